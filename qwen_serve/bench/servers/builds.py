"""llama.cpp's sources and programs, for comparisons, from the sdist of the pinned llama-cpp-python.

    qwen-bench build llama-server llama-batched-bench

builds programs (with CUDA if there is an NVIDIA GPU and nvcc) and prints their folder. pip fetches the sdist
and cmake builds it, once, in `.work/llama.cpp` of the checkout. The programs of this command have the
server's patches and kernels (patches/README.md); those of `qwen-bench peers` are stock. PATCHES=0 or 1 in the
environment overrides that. Each kind of build has a folder of its own.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

from cyclopts import Parameter

from qwen_serve.bench.errors import BenchError
from qwen_serve.server import build_machine, llama_build
from qwen_serve.server.about import data_folder

Flavour = Literal["cpu", "cuda"]

CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
TARGET = re.compile(r"(?:set\s*\(\s*TARGET|add_executable\s*\()\s*(llama-[\w-]+)")
"""Matches the name of a program in llama.cpp's cmake files."""
CACHE = Path(__file__).resolve().parents[3] / ".work" / "llama.cpp"


def llama_cpp_sources() -> Path:
    """The folder of llama.cpp's sources, from the sdist of the installed llama-cpp-python's version. Raises
    BenchError if they cannot be fetched."""
    release = version("llama-cpp-python")
    root = CACHE / f"llama_cpp_python-{release}"
    sources = root / "vendor" / "llama.cpp"
    with _alone():
        if not root.is_dir():
            _unpack(_download(release), root)
    return sources


def build_programs(names: Sequence[str], flavour: Flavour = "cpu", *, patched: bool = True) -> Path:
    """Build those of llama.cpp's programs, such as llama-quantize, that are missing. Returns their folder.

    PATCHES=0 or 1 in the environment overrides `patched`. Raises BenchError if a name is not one of
    llama.cpp's programs, or the sources cannot be fetched or do not build.
    """
    sources = llama_cpp_sources()
    known = programs_of(sources)
    if unknown := [name for name in names if name not in known]:
        raise BenchError(f"{unknown[0]}: no program of llama.cpp; there are {', '.join(known)}")
    queue, options = _patches(patched)
    build = sources.parents[1] / (("build" if flavour == "cpu" else f"build-{flavour}") + queue)
    with _alone():
        if missing := [name for name in names if not (build / "bin" / name).is_file()]:
            print(f"building {', '.join(missing)} ({flavour}): some minutes, once", file=sys.stderr)
            _run(_cmake(), "-S", sources, "-B", build, *CMAKE_OPTIONS, *options, *_backend(flavour))
            jobs = str(build_machine.processors())
            _run(_cmake(), "--build", build, "--config", "Release", "-j", jobs, "--target", *names)
    return build / "bin"


def programs_of(sources: Path) -> list[str]:
    """The names of llama.cpp's programs."""
    files = (path.read_text(encoding="utf-8") for path in (sources / "tools").rglob("CMakeLists.txt"))
    return sorted({name for text in files for name in TARGET.findall(text) if not name.endswith("-impl")})


def this_machines_flavour() -> Flavour:
    """cuda if there is an NVIDIA GPU and the system has nvcc, else cpu. The toolkit of CUDA=pypi is not
    used."""
    return "cuda" if build_machine.cards() and build_machine.nvcc() is not None else "cpu"


def _backend(flavour: Flavour) -> list[str]:
    if flavour == "cpu":
        return ["-DGGML_CUDA=OFF"]
    return [
        "-DGGML_CUDA=ON",
        f"-DCMAKE_CUDA_COMPILER={build_machine.nvcc()}",
        f"-DCMAKE_CUDA_ARCHITECTURES={build_machine.cards()}",
    ]


def _patches(patched: bool) -> tuple[str, list[str]]:
    """(suffix of the build folder's name, options for cmake)."""
    options = [f"-DCMAKE_PROJECT_INCLUDE={data_folder('patches') / 'apply.cmake'}"]
    if os.environ.get("PATCHES", str(int(patched))) == "0":
        return "", [*options, "-DLLAMA_PATCHES=OFF"]
    return f"-patched-{llama_build.sources_digest()}", [*options, "-DLLAMA_PATCHES=ON"]


@contextmanager
def _alone() -> Iterator[None]:
    """Let one process at a time download or build."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / ".lock").open("w") as lock:
        flock(lock, LOCK_EX)
        yield


def _download(release: str) -> Path:
    print(f"fetching llama-cpp-python {release}, which brings llama.cpp's sources", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", "llama-cpp-python", "--dest", str(CACHE), f"llama-cpp-python=={release}"]
    _run(*command)
    return next(CACHE.glob(f"llama_cpp_python-{release}.tar.gz"))


def _unpack(archive: Path, root: Path) -> None:
    with TemporaryDirectory(prefix=".unpacking-", dir=root.parent) as work, tarfile.open(archive) as tar:
        tar.extractall(work, filter="data")
        Path(work, root.name).rename(root)


def _cmake() -> str:
    found = shutil.which("cmake")
    if found is None:
        raise BenchError("cmake is needed to build llama.cpp's programs")
    return found


def _run(*command: str | Path) -> None:
    """Run a command with its output on stderr, since stdout is for the result. Raises BenchError if it
    fails."""
    done = subprocess.run(list(map(str, command)), stdout=sys.stderr.fileno(), check=False)
    if done.returncode != 0:
        raise BenchError(f"{' '.join(map(str, command))} ended with status {done.returncode}")


def build(
    programs: Annotated[tuple[str, ...], Parameter(negative=())], /, *, flavour: Flavour | None = None
) -> int:
    """Build llama.cpp's programs and print their folder.

    - `qwen-bench build llama-server llama-batched-bench`
    - `qwen-bench build llama-quantize --flavour cpu`

    Parameters
    ----------
    programs
        Names of programs, such as llama-server llama-batched-bench.
    flavour
        cpu or cuda (default: cuda if there is an NVIDIA GPU and nvcc).
    """
    print(build_programs(programs, flavour or this_machines_flavour()))
    return 0
