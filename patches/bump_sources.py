"""Releases of llama-cpp-python as bump.py takes them: fetched by pip, unpacked."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

PACKAGE = "llama-cpp-python"


class BumpError(Exception):
    """What went wrong or has to be solved by hand, for whoever typed the command."""


def fetched(version: str, folder: Path) -> Path:
    """The sdist, by pip, once."""
    if not (found := list(folder.glob(f"llama_cpp_python-{version}.tar.gz"))):
        folder.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        command += ["--no-binary", PACKAGE, "--dest", str(folder), f"{PACKAGE}=={version}"]
        if subprocess.run(command, check=False).returncode != 0:
            raise BumpError(f"pip could not fetch the sdist of {PACKAGE} {version}; --sdist names a file")
        found = list(folder.glob(f"llama_cpp_python-{version}.tar.gz"))
    return found[0]


def unpacked(archive: Path, folder: Path) -> Path:
    """The one folder inside, anew."""
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(archive) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        tar.extractall(folder)
    (inside,) = folder.iterdir()
    return inside


def run(output: Any, *command: str | Path) -> None:
    """Raises BumpError."""
    if subprocess.run(list(map(str, command)), stdout=output, stderr=output, check=False).returncode != 0:
        raise BumpError(f"{' '.join(map(str, command))} failed; see {output.name}")
