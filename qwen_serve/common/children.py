"""Child processes that end with their parent."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.connection import wait
from pathlib import Path

PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""


def end_with_parent(*unfinished: Path) -> None:
    """Call this in a child process of multiprocessing. When its parent dies, even by SIGKILL, the child
    removes its `unfinished` files and ends, wherever its work is."""
    threading.Thread(target=_wait, args=unfinished, daemon=True).start()


def _wait(*unfinished: Path) -> None:
    parent = parent_process()
    assert parent is not None, "this is the child"
    wait([parent.sentinel])
    for path in unfinished:
        path.unlink(missing_ok=True)
    os._exit(1)


def sigterm_with_parent() -> Callable[[], None] | None:
    """A `preexec_fn` for Popen: the program gets SIGTERM when this process dies, even by SIGKILL.

    Only Linux has this (prctl(2)); None on other systems. For Linux the parent is the thread that starts the
    program, so start it on the main thread.
    """
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent died before prctl
            os._exit(1)

    return ask
