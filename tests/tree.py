"""What git has. A path on the disk may be left over, or not added."""

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


def git(*command: str, given: str = "") -> list[str]:
    """The lines that git prints. Raises AssertionError if it fails."""
    done = subprocess.run(["git", *command], cwd=ROOT, input=given, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr  # 1: check-ignore knows none
    return done.stdout.splitlines()


@cache
def files() -> tuple[str, ...]:
    """All files, relative to the tree."""
    return tuple(git("ls-files"))


@cache
def paths() -> frozenset[str]:
    """All files and their folders."""
    parts = (path.split("/") for path in files())
    return frozenset("/".join(names[: n + 1]) for names in parts for n in range(len(names)))
