"""Whether processes of others still run."""

from pathlib import Path
from time import sleep


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def ends(pid: int) -> bool:
    """Whether it is gone within twenty seconds: a signal takes a moment to arrive."""
    for _ in range(1000):
        if not is_running(pid):
            return True
        sleep(0.02)
    return False
