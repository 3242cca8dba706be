"""Child processes that end with their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from multiprocessing import parent_process
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""


def end_with_parent(*unfinished: Path) -> None:
    """Called in a child of multiprocessing's: it ends in the middle of its work once its parent is dead, of
    SIGKILL too, and removes the files that it has not finished."""
    threading.Thread(target=_wait, args=unfinished, daemon=True).start()


def _wait(*unfinished: Path) -> None:
    parent = parent_process()
    assert parent is not None, "this is the child"
    wait([parent.sentinel])
    for path in unfinished:
        path.unlink(missing_ok=True)
    os._exit(1)


def sigterm_with_parent() -> Callable[[], None] | None:
    """The `preexec_fn` of a Popen whose program gets SIGTERM once this process is dead, of SIGKILL too.

    Linux alone has this (prctl(2)); None elsewhere. There the parent is the thread that starts the program:
    call it on the main thread.
    """
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before it was asked about
            os._exit(1)

    return ask
