"""Runs programs, and checks whether processes still run."""

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.waiting import wait_until


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def ends(pid: int) -> bool:
    """Whether a process ends within twenty seconds, since a signal takes a moment to arrive."""
    return wait_until(lambda: not is_running(pid))


def group_runs(group: int) -> bool:
    """Whether a process group still has a process."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def run(
    command: Iterable[str | Path], *, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program and capture its output. `options`: those of `subprocess.run`."""
    words = [*map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, check=check, **options)
