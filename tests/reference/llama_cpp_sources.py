"""llama.cpp's own sources and tools, from the sdist of the pinned llama-cpp-python, to compare with.

Everything lands under `.work/llama.cpp` of the checkout and is made once: the sdist by pip, tools by cmake.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from importlib.metadata import version
from pathlib import Path

CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_CUDA=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
CACHE = Path(__file__).parents[2] / ".work" / "llama.cpp"


def llama_cpp_sources() -> Path:
    """The vendored llama.cpp of the installed llama-cpp-python's version, unpacked."""
    release = version("llama-cpp-python")
    root = CACHE / f"llama_cpp_python-{release}"
    sources = root / "vendor" / "llama.cpp"
    with _alone():
        if not root.is_dir():
            _unpack(_download(release), root)
    return sources


def build_tools(names: Sequence[str]) -> Path:
    """Builds llama.cpp programs such as llama-quantize for the CPU; returns the folder they are in."""
    sources = llama_cpp_sources()
    build = sources.parents[1] / "build"
    with _alone():
        if any(not (build / "bin" / name).is_file() for name in names):
            _cmake(["-S", sources, "-B", build, *CMAKE_OPTIONS])
            jobs = str(len(os.sched_getaffinity(0)))
            _cmake(["--build", build, "--config", "Release", "-j", jobs, "--target", *names])
    return build / "bin"


@contextmanager
def _alone() -> Iterator[None]:
    """Lets one process at a time download or build."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / ".lock").open("w") as lock:
        flock(lock, LOCK_EX)
        yield


def _download(release: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", "llama-cpp-python", "--dest", str(CACHE), f"llama-cpp-python=={release}"]
    subprocess.run(command, check=True)
    return next(CACHE.glob(f"llama_cpp_python-{release}.tar.gz"))


def _unpack(archive: Path, root: Path) -> None:
    part = root.with_name(root.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    with tarfile.open(archive) as tar:
        tar.extractall(part, filter="data")
    (part / root.name).rename(root)
    part.rmdir()


def _cmake(arguments: Sequence[str | Path]) -> None:
    command = shutil.which("cmake") or sys.exit("cmake is needed to build llama.cpp's tools")
    subprocess.run([command, *map(str, arguments)], check=True)
