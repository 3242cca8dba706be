"""Whether processes of others still run."""

import os
from pathlib import Path

from tests.waiting import wait_until


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def ends(pid: int) -> bool:
    """Whether it is gone within twenty seconds: a signal takes a moment to arrive."""
    return wait_until(lambda: not is_running(pid))


def group_runs(group: int) -> bool:
    """Whether a process group has a process."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
