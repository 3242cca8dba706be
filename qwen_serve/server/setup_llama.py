"""Installs llama-cpp-python with patches: builds it for this machine and keeps the wheel.

    qwen-serve setup
    make setup                                        # also installs the packages
    python -m qwen_serve.server.setup_llama           # before anything is installed

It builds the pinned version with the patches of `patches/`, and only the libraries that Python
loads. (pip alone installs stock llama.cpp, which works but is slower.) If QWEN_SERVE_WHEELS names
a release's folder or URL, it first looks for a wheel with the same patches there, which needs no
compiler.

The wheel is kept in the folder `wheels` of the cache (QWEN_SERVE_CACHE, else
$XDG_CACHE_HOME/qwen-serve, else ~/.cache/qwen-serve), so another environment is set up in
seconds. Machines may share that folder, over a network or as a CI cache: a wheel's name covers
everything that it depends on.

It needs only the standard library and pip.
"""

import argparse
import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from fcntl import LOCK_EX, flock
from pathlib import Path
from urllib.parse import unquote, urlparse

from qwen_serve.server import cuda_wheels, released_wheels
from qwen_serve.server.about import WHEELS_VARIABLE, cache_folder
from qwen_serve.server.build_machine import cards, first_line, nvcc, processors
from qwen_serve.server.llama_build import PACKAGE, Build, SetupError
from qwen_serve.server.released_wheels import Released

DEFAULT_CARD = "86"
"""The A10G's architecture, used if CUDA is requested and no GPU is present."""

WHEEL_WITHOUT = ("lib/**", "lib64/**", "include/**", "bin/**")
"""Duplicates and headers that llama.cpp's install rules add to the wheel."""


def main(
    arguments: Sequence[str] | None = None, prog: str = "python -m qwen_serve.server.setup_llama"
) -> int:
    """Builds or finds the wheel and installs it, unless it is installed. Returns 0, or 1 with the reason on
    stderr."""
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cuda",
        choices=("auto", "0", "1", "pypi"),
        default="auto",
        help="0: for the CPU. 1: with CUDA. pypi: with CUDA's toolkit, downloaded from PyPI. auto: CUDA if "
        "this machine has a GPU and nvcc (%(default)s)",
    )
    parser.add_argument(
        "--cuda-archs",
        metavar="A;B",
        help=f"compute capabilities to build for, such as 86;89 (this machine's GPUs, else {DEFAULT_CARD})",
    )
    parser.add_argument("--patches", choices=("0", "1"), default="1", help="0: stock llama.cpp (%(default)s)")
    parser.add_argument(
        "--native",
        choices=("0", "1"),
        default="1",
        help="0: for every processor of the same architecture, as for an image (%(default)s)",
    )
    parser.add_argument(
        "--wheels",
        metavar="WHERE",
        default=released_wheels.place(),
        help="folder or URL of a release's wheels, to use instead of a build; '' always builds "
        f"({WHEELS_VARIABLE}: %(default)r)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be done")
    parser.add_argument(
        "--advise", action="store_true", help="only print how to get nvcc, if there is a GPU without it"
    )
    options = parser.parse_args(arguments)
    try:
        return _set_up(options)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _set_up(options: argparse.Namespace) -> int:
    """Runs the setup with the parsed options; returns 0. Raises SetupError."""
    ready, why = _ready(options)
    installed = installed_key()
    taken = ready is not None and installed == ready.key
    advice = card_without_nvcc() if options.cuda == "auto" and not taken else ""
    if options.advise:
        print(advice, end="")
        return 0
    build, missing = _own_build(options)
    # without a compiler here, only a released wheel can use the GPU
    there = build is not None and not (ready is not None and ready.cuda and not build.cuda)
    there = there and build is not None and (installed == build.key or bool(_kept(build)))
    if ready is not None and not taken and not there:
        try:
            if options.dry_run:
                name = released_wheels.listed(ready, options.wheels)[0]
                print(f"would take {name} of {released_wheels.shown(options.wheels)}")
            else:
                wheel = released_wheels.fetch(ready, options.wheels)
                if ready.cuda:
                    install(released_wheels.CUDA_RUNTIME)
                install("--no-deps", "--force-reinstall", str(wheel))
                print(f"taken instead of building: {ready.key} of {released_wheels.shown(options.wheels)}")
            taken = True
        except released_wheels.NoWheel as error:
            why = str(error)
    if taken and ready is not None:
        print(f"{PACKAGE} is built {ready.description}")
        return 0
    if why and not there:
        print(f"no ready-made wheel: {why}", flush=True)
    print(advice, end="", flush=True)
    if build is None:
        raise SetupError(missing)
    if not options.dry_run and installed != build.key:
        wheel = kept_wheel(build)
        if build.cuda_from_wheels:
            install(cuda_wheels.RUNTIME)
        install("--no-deps", "--force-reinstall", str(wheel))
    print(f"{PACKAGE} is built {build.description}")
    if options.dry_run:
        print(f"{build.key}: cmake {shlex.join(build.cmake_args)}")
    print(advice, end="")
    return 0


def _ready(options: argparse.Namespace) -> tuple[Released | None, str]:
    """The released wheel to look for, or why there is none."""
    if not options.wheels:
        return None, ""
    try:
        return released_wheels.fitting(
            cuda=options.cuda,
            archs=options.cuda_archs,
            patched=options.patches == "1",
            native=options.native == "1",
        ), ""
    except released_wheels.NoWheel as error:
        return None, str(error)


def _own_build(options: argparse.Namespace) -> tuple[Build | None, str]:
    """The build for this machine, or what is missing for it."""
    from_wheels = options.cuda == "pypi" or (options.cuda == "auto" and nvcc() is None)
    try:
        return Build(
            cuda=options.cuda in {"1", "pypi"} or (options.cuda == "auto" and card_with_nvcc()),
            cuda_from_wheels=from_wheels,
            cards=options.cuda_archs or cards() or DEFAULT_CARD,
            patched=options.patches == "1",
            native=options.native == "1",
        ), ""
    except SetupError as error:
        return None, str(error)


def card_with_nvcc() -> bool:
    """Whether there is a GPU and a compiler for it: the system's nvcc, or one fetched by CUDA=pypi."""
    found = cards()
    if not found or nvcc() is not None:
        return bool(found)
    return cuda_wheels.nvcc().is_file() and not cuda_wheels.too_old(found)


def card_without_nvcc() -> str:
    """A framed warning if the GPU is not used because there is no compiler; else ""."""
    if not (found := cards()) or card_with_nvcc():
        return ""
    from_wheels = (
        "To use it, build with the CUDA toolkit of PyPI's wheels:",
        "  make setup CUDA=pypi                (qwen-serve setup --cuda pypi)",
        "Or install a CUDA toolkit, put its bin/ on PATH, and run this again:",
    )
    installed = "To use it, install a CUDA toolkit, put its bin/ on PATH, and run this again:"
    lines = (
        f"There is a card here (compute capability {found}), but no nvcc, CUDA's compiler:",
        "llama.cpp is built for the CPU, and the card is not used.",
        "",
        *(from_wheels if not cuda_wheels.too_old(found) else (installed,)),
        "  apt install nvidia-cuda-toolkit     Debian (its section non-free), Ubuntu",
        "  pacman -S cuda                      Arch Linux, in /opt/cuda/bin",
        "  https://developer.nvidia.com/cuda-downloads     all others, and the newest",
        "CUDA=0 (--cuda 0) builds for the CPU without this notice.",
    )
    width = max(map(len, lines))
    frame = "*" * (width + 4)
    return "\n".join([frame, *(f"* {line:<{width}} *" for line in lines), frame, ""])


def kept_wheel(build: Build) -> Path:
    """The wheel in the cache, built first if it is missing; one process at a time. Raises SetupError."""
    if wheels := _kept(build):  # before any write: a shared folder may be read-only
        print(f"from the cache: {wheels[0]}")
        return wheels[0]
    folder = cache_folder() / "wheels"
    target = folder / build.key
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            flock(lock, LOCK_EX)
            if not target.is_dir():
                if build.cuda_from_wheels:
                    fetch_cuda()
                with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as work:
                    build_wheel(build, Path(work))
                    (Path(work) / "out" / "build.json").write_text(json.dumps(build.parts, indent=2) + "\n")
                    (Path(work) / "out").rename(target)
    except OSError as error:
        raise SetupError(f"{error}; QWEN_SERVE_CACHE names another folder to build in") from error
    return next(target.glob("*.whl"))


def fetch_cuda() -> None:
    """Fetches PyPI's CUDA toolkit into the cache, unless it is there. Raises SetupError, OSError."""
    target = cuda_wheels.folder()
    if target.is_dir():
        return
    print(f"fetching {cuda_wheels.TOOLKIT}: once, 1.1 GB unpacked", flush=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=target.parent) as work:
        unpacked = Path(work) / "toolkit"
        pip("install", "--target", str(unpacked), cuda_wheels.TOOLKIT)
        try:
            cuda_wheels.complete(unpacked)
        except subprocess.CalledProcessError as error:
            raise SetupError(f"the stub of libcuda failed to compile:\n{error.stderr}") from error
        unpacked.rename(target)


def _kept(build: Build) -> list[Path]:
    return list((cache_folder() / "wheels" / build.key).glob("*.whl"))


def build_wheel(build: Build, work: Path) -> None:
    """Builds the wheel into `work/out`. Raises SetupError."""
    if not first_line(os.environ.get("CXX", "c++"), "--version"):
        raise SetupError(
            "no C++ compiler: install one (build-essential on Debian), name it in CXX, or name a release's "
            f"wheels in {WHEELS_VARIABLE}"
        )
    if build.patched and shutil.which("patch") is None:
        raise SetupError("llama.cpp's patches need the program patch (--patches 0 does without)")
    print(f"building {PACKAGE} {build.description}: once, some minutes", flush=True)
    environment = {
        **os.environ,
        "CMAKE_ARGS": shlex.join(build.cmake_args),
        "CMAKE_BUILD_PARALLEL_LEVEL": os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(processors())),
        "CCACHE_BASEDIR": str(work),  # lets ccache, if installed, find the same files in any folder
    }
    settings = (
        f"build-dir={work / 'build'}",
        "build.targets=llama;mtmd",
        f"wheel.exclude={';'.join(WHEEL_WITHOUT)}",
    )
    pip("download", "--no-deps", "--no-binary", PACKAGE, "--dest", str(work), build.requirement)
    with tarfile.open(next(work.glob("*.tar.gz"))) as tar:
        # only in Python 3.11.4 and later
        tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        tar.extractall(work)
    (sources,) = (path.parent for path in work.glob("*/pyproject.toml"))
    make = ["wheel", "--no-deps", "--wheel-dir", str(work / "out")]
    make += [f"--config-settings={setting}" for setting in settings]
    pip(*make, str(sources), environment=environment)


def install(*what: str) -> None:
    """Installs into this environment: pip's options, then a requirement or wheel. Raises SetupError."""
    pip("install", "--quiet", *what)


def pip(*arguments: str, environment: Mapping[str, str] = os.environ) -> None:
    """Runs pip, which says what goes wrong. Raises SetupError."""
    command = [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check"]
    if subprocess.run(command, env=environment, check=False).returncode != 0:
        raise SetupError(f"pip {arguments[0]} failed for {arguments[-1]}")


def installed_key() -> str | None:
    """The `Build.key` of the installed package; None if it came from elsewhere or is missing."""
    try:
        record = importlib.metadata.distribution(PACKAGE).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    return Path(unquote(urlparse(json.loads(record)["url"]).path)).parent.name if record else None


if __name__ == "__main__":
    sys.exit(main())
