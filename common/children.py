"""Child processes of multiprocessing's that end with their parent."""

from __future__ import annotations

import os
import threading
from multiprocessing import parent_process
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def end_with_parent(*unfinished: Path) -> None:
    """Called in the child: it ends in the middle of its work once its parent is dead, of SIGKILL too, and
    removes the files that it has not finished."""
    threading.Thread(target=_wait, args=unfinished, daemon=True).start()


def _wait(*unfinished: Path) -> None:
    parent = parent_process()
    assert parent is not None, "this is the child"
    wait([parent.sentinel])
    for path in unfinished:
        path.unlink(missing_ok=True)
    os._exit(1)
