"""llama-cpp-python as the server wants it: patched, built for this machine, and kept as a wheel.

    qwen-serve setup        (make setup; python -m qwen_serve.server.setup_llama before anything is installed)

What pip installs by itself is llama.cpp as it comes, which works and is slower. This builds the pinned
version with the patches of `patches/`, only the libraries that Python loads, and installs that. The wheel
stays in the folder `wheels` of the cache (QWEN_SERVE_CACHE, else $XDG_CACHE_HOME/qwen-serve, else
~/.cache/qwen-serve) under a name made from everything that it depends on, so that the next environment with
the same takes seconds. Machines may share that folder, over a network or as a CI cache: what does not fit a
machine is not found by it.

Only the standard library and pip are needed: it is what runs first.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections import deque
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import unquote, urlparse

from qwen_serve.server import cuda_wheels
from qwen_serve.server.about import cache_folder, data_folder
from qwen_serve.server.build_machine import cards, first_line, nvcc, processor, processors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PACKAGE = "llama-cpp-python"
BUILD_REQUIRES = ("scikit-build-core[pyproject]>=0.9.2",)
"""Its own `build-system.requires`; cmake and ninja are fetched, too, where there are none."""

DEFAULT_CARD = "86"
"""The A10G, where CUDA is asked for and no card is there to tell."""

WHEEL_WITHOUT = ("lib/**", "lib64/**", "include/**", "bin/**")
"""Second copies and headers, which llama.cpp's own install rules put beside the package."""

PROGRESS = re.compile(r"\s*\[\s*(?:(\d+)/(\d+)|(\d+)%)\]")
"""How ninja and make count: `[12/78] ...`, `[ 12%] ...`."""

TAIL = 30
"""Lines of the log that are shown when a build fails."""


class SetupError(Exception):
    """What is missing or failed, in words for whoever typed the command."""


class Build:
    """One way to build llama-cpp-python on this machine; `key` is equal where the result is."""

    def __init__(
        self, *, cuda: bool, cards: str, patched: bool, native: bool, cuda_from_wheels: bool = False
    ) -> None:
        """
        Args:
            cuda_from_wheels: with the toolkit of `cuda_wheels`, which need not be there yet.
            cards: CUDA architectures such as "86;89".
            patched: with the patches of `patches/llama.cpp`.
            native: for this very processor, else for any of its kind.

        Raises:
            SetupError: CUDA without nvcc, or from wheels for a card that they do not support.
        """
        self.requirement = requirement()
        self.patched, self.native, self.cuda, self.cards = patched, native, cuda, cards
        self.cuda_from_wheels = cuda and cuda_from_wheels
        self._nvcc = (cuda_wheels.nvcc() if cuda_from_wheels else nvcc()) if cuda else None
        if cuda and self._nvcc is None:
            raise SetupError(
                "CUDA=1 needs nvcc: put the CUDA toolkit's bin/ on PATH, or use CUDA=pypi (--cuda pypi)"
            )
        if self.cuda_from_wheels and (old := cuda_wheels.too_old(cards)):
            raise SetupError(
                f"CUDA=pypi is CUDA {cuda_wheels.VERSION}, which supports cards of compute capability 75 and "
                f"later, not {';'.join(old)}: install a CUDA 12 toolkit, put its bin/ on PATH and use "
                "CUDA=1, or name other cards with CUDA_ARCHS (--cuda-archs)"
            )
        self._patches = data_folder("patches")

    @property
    def backend(self) -> str:
        """cuda-<architectures>, metal or cpu."""
        if self.cuda:
            return f"cuda-{self.cards.replace(';', '-')}"
        return "metal" if sys.platform == "darwin" else "cpu"

    @property
    def parts(self) -> dict[str, str]:
        """Everything that the libraries depend on."""
        return {
            "package": self.requirement,
            "backend": self.backend,
            "patches": self._patches_digest() if self.patched else "none",
            "processor": processor() if self.native else platform.machine(),
            "system": " ".join([sys.platform, *platform.libc_ver()]),
            "compiler": first_line(os.environ.get("CXX", "c++"), "--version"),
            "nvcc": self._compiler_of_cuda(),
            "cmake_args": shlex.join(
                arg.replace(str(cuda_wheels.folder()), cuda_wheels.TOOLKIT)
                for arg in self.cmake_args
                if str(self._patches) not in arg
            ),
        }

    def _compiler_of_cuda(self) -> str:
        if self._nvcc is None:
            return "none"
        if self.cuda_from_wheels:  # a kept wheel is found without the toolkit
            return cuda_wheels.TOOLKIT
        return first_line(str(self._nvcc), "--version", line=-1)

    @property
    def key(self) -> str:
        """A folder's name: version, backend, and a digest of all parts."""
        digest = hashlib.sha256(json.dumps(self.parts, sort_keys=True).encode()).hexdigest()[:16]
        return f"{self.requirement.partition('==')[2]}-{self.backend}-{digest}"

    @property
    def description(self) -> str:
        """Such as "with CUDA for compute capability 86, patched"."""
        chosen = {
            "cpu": f"for the CPU (card: {cards() or 'none'}, nvcc: {nvcc() or 'none'})",
            "metal": "with Metal",
        }
        said = chosen.get(self.backend, f"with CUDA for compute capability {self.cards} ({self._nvcc})")
        return said + (", patched" if self.patched else "") + ("" if self.native else ", for any processor")

    @property
    def cmake_args(self) -> list[str]:
        """What CMake is told; CMAKE_ARGS of the environment comes last and wins."""
        args = [
            "-DCMAKE_BUILD_TYPE=Release",
            "-DMTMD_VIDEO=OFF",
            "-DLLAMA_ALL_WARNINGS=OFF",
            f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={self._patches / 'libllama.cmake'}",
            f"-DCMAKE_PROJECT_INCLUDE={self._patches / 'apply.cmake'}",
            f"-DLLAMA_PATCHES={'ON' if self.patched else 'OFF'}",
        ]
        if not self.native:
            args.append("-DGGML_NATIVE=OFF")
        if self.cuda:
            # --exclude-libs: libggml-cuda would otherwise export the C++ runtime of CUDA's static libraries.
            # The stubs stand in for the driver's libcuda, which a build has not.
            compiler = Path(str(self._nvcc))
            toolkit = (compiler if self.cuda_from_wheels else compiler.resolve()).parents[1]
            stubs = toolkit / "lib64" / "stubs"
            args += [
                "-DGGML_CUDA=ON",
                f"-DCMAKE_CUDA_COMPILER={self._nvcc}",
                f"-DCMAKE_CUDA_ARCHITECTURES={self.cards}",
                f"-DCMAKE_SHARED_LINKER_FLAGS=-Wl,--exclude-libs,ALL,-rpath-link,{stubs}",
            ]
            # Otherwise CMake may take headers and libraries from /usr/local/cuda. Where nvcc is a link to
            # ccache, there is no toolkit beside it.
            if self.cuda_from_wheels or (toolkit / "bin" / "nvcc").exists():
                args.append(f"-DCUDAToolkit_ROOT={toolkit}")
            if self.cuda_from_wheels:
                args.append(f"-DLLAMA_CUDA_LIBRARIES=../../{cuda_wheels.ROOT / 'lib'}")
        return [*args, *shlex.split(os.environ.get("CMAKE_ARGS", ""))]

    def _patches_digest(self) -> str:
        digest = hashlib.sha256()
        files = [*self._patches.glob("*.cmake"), *(self._patches / "llama.cpp").glob("*.patch")]
        for path in sorted(files, key=lambda path: path.name):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()[:16]


def main(
    arguments: Sequence[str] | None = None, prog: str = "python -m qwen_serve.server.setup_llama"
) -> int:
    """Builds or finds the wheel and installs it, unless it is there; 0, or 1 with the reason on stderr."""
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cuda",
        choices=("auto", "0", "1", "pypi"),
        default="auto",
        help="with CUDA; pypi: with the CUDA toolkit of PyPI's wheels, which are fetched (%(default)s: where "
        "there is both a card and nvcc, the system's or that of an earlier pypi)",
    )
    parser.add_argument(
        "--cuda-archs",
        metavar="A;B",
        help=f"compute capabilities, such as 86;89 (this machine's cards, else {DEFAULT_CARD})",
    )
    parser.add_argument(
        "--patches", choices=("0", "1"), default="1", help="0: llama.cpp as it comes (%(default)s)"
    )
    parser.add_argument(
        "--native",
        choices=("0", "1"),
        default="1",
        help="0: for any processor of this kind, as for an image (%(default)s)",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be done")
    parser.add_argument("--advise", action="store_true", help="only say what a card without nvcc needs")
    options = parser.parse_args(arguments)
    advice = card_without_nvcc() if options.cuda == "auto" else ""
    if options.advise:
        print(advice, end="")
        return 0
    print(advice, end="", flush=True)
    try:
        found = options.cuda_archs or cards()
        from_wheels = options.cuda == "pypi" or (options.cuda == "auto" and nvcc() is None)
        build = Build(
            cuda=options.cuda in {"1", "pypi"} or (options.cuda == "auto" and card_with_nvcc()),
            cuda_from_wheels=from_wheels,
            cards=found or DEFAULT_CARD,
            patched=options.patches == "1",
            native=options.native == "1",
        )
        if not options.dry_run and installed_key() != build.key:
            wheel = kept_wheel(build)
            if build.cuda_from_wheels:
                install(cuda_wheels.RUNTIME)
            install("--no-deps", "--force-reinstall", str(wheel))
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{PACKAGE} is built {build.description}")
    if options.dry_run:
        print(f"{build.key}: cmake {shlex.join(build.cmake_args)}")
    print(advice, end="")
    return 0


def card_with_nvcc() -> bool:
    """Whether there is a card and a compiler for it: the system's nvcc, or one that CUDA=pypi has fetched."""
    found = cards()
    if not found or nvcc() is not None:
        return bool(found)
    return cuda_wheels.nvcc().is_file() and not cuda_wheels.too_old(found)


def card_without_nvcc() -> str:
    """A framed paragraph, where a card would go unused for want of its compiler; else nothing."""
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
    """The wheel in the cache, built first if it is not there; one process at a time. Raises SetupError."""
    folder = cache_folder() / "wheels"
    target = folder / build.key
    if wheels := list(target.glob("*.whl")):  # before anything is written: a shared folder may be read-only
        print(f"from the cache: {wheels[0]}")
        return wheels[0]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            flock(lock, LOCK_EX)
            if not target.is_dir():
                if build.cuda_from_wheels:
                    fetch_cuda()
                with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as work:
                    _build_wheel(build, Path(work))
                    (Path(work) / "out" / "build.json").write_text(json.dumps(build.parts, indent=2) + "\n")
                    (Path(work) / "out").rename(target)
    except OSError as error:
        raise SetupError(f"{error}; QWEN_SERVE_CACHE names another folder to build in") from error
    return next(target.glob("*.whl"))


def fetch_cuda() -> None:
    """The toolkit of PyPI's wheels into the cache, unless it is there. Raises SetupError, OSError."""
    target = cuda_wheels.folder()
    if target.is_dir():
        return
    print(f"fetching {cuda_wheels.TOOLKIT}: once, 1.1 GB unpacked", flush=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    log = target.with_name(f"{target.name}.log")
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=target.parent) as work, log.open("w") as output:
        unpacked = Path(work) / "toolkit"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
        fetch = [*pip, "--target", str(unpacked), cuda_wheels.TOOLKIT]
        follow(fetch, os.environ, "CUDA's wheels", output)
        try:
            cuda_wheels.complete(unpacked)
        except subprocess.CalledProcessError as error:
            raise SetupError(f"the stub of libcuda failed to compile:\n{error.stderr}") from error
        unpacked.rename(target)
    log.unlink()


def _build_wheel(build: Build, work: Path) -> None:
    """Leaves the wheel in `work/out`."""
    for program in ("patch",) if build.patched else ():
        if shutil.which(program) is None:
            raise SetupError(f"llama.cpp's patches need the program {program} (--patches 0 does without)")
    if not build.parts["compiler"]:
        raise SetupError("no C++ compiler: install one (build-essential on Debian), or name it in CXX")
    print(f"building {PACKAGE} {build.description}: once, some minutes", flush=True)
    tools = [*BUILD_REQUIRES, *(name for name in ("cmake", "ninja") if shutil.which(name) is None)]
    environment = {
        **os.environ,
        "CMAKE_ARGS": shlex.join(build.cmake_args),
        "CMAKE_BUILD_PARALLEL_LEVEL": os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(processors())),
        "CCACHE_BASEDIR": str(work),  # ccache, where there is one, finds the same files in every such folder
        "PYTHONPATH": os.pathsep.join(filter(None, [str(work / "tools"), os.environ.get("PYTHONPATH")])),
        "PATH": os.pathsep.join([str(work / "tools" / "bin"), os.environ.get("PATH", os.defpath)]),
    }
    log = work.with_name(f"{build.key}.log")
    with log.open("w") as output:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        fetch = ["download", "--no-deps", "--no-build-isolation", "--no-binary", PACKAGE, "--dest", str(work)]
        make = ["wheel", "-v", "--no-deps", "--no-build-isolation", "--wheel-dir", str(work / "out")]
        settings = [
            f"build-dir={work / 'build'}",
            "build.targets=llama;mtmd",
            f"wheel.exclude={';'.join(WHEEL_WITHOUT)}",
        ]
        make += [f"--config-settings={setting}" for setting in settings]
        follow([*pip, "install", "--target", str(work / "tools"), *tools], os.environ, "build tools", output)
        follow([*pip, *fetch, build.requirement], environment, "llama.cpp's sources", output)
        with tarfile.open(next(work.glob("*.tar.gz"))) as tar:
            # a method of Python 3.11.4 and later
            tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
            tar.extractall(work)
        (sources,) = (path.parent for path in work.glob("*/pyproject.toml"))
        follow([*pip, *make, str(sources)], environment, "llama.cpp", output)
    log.unlink()


def install(*what: str) -> None:
    """Into this environment: pip's options, then a requirement or wheel. Raises SetupError."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    if subprocess.run([*command, *what], check=False).returncode != 0:
        raise SetupError(f"pip could not install {what[-1]}")


def installed_key() -> str | None:
    """The `Build.key` of what is installed; None where it came from elsewhere or is not there."""
    try:
        record = importlib.metadata.distribution(PACKAGE).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    return Path(unquote(urlparse(json.loads(record)["url"]).path)).parent.name if record else None


def requirement() -> str:
    """The pin, `llama-cpp-python==...`: of the checkout around this file, else of the installed package."""
    project = Path(__file__).resolve().parents[1] / "pyproject.toml"
    if project.is_file():
        wanted: list[str] = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    else:
        wanted = importlib.metadata.requires("qwen-serve") or []
    return next(line for line in wanted if line.startswith(f"{PACKAGE}=="))


def follow(command: Sequence[str], environment: Mapping[str, str], what: str, log: IO[str]) -> None:
    """Runs to the end, all output to `log` and how far it is to the terminal. Raises SetupError."""
    log.write(f"$ {shlex.join(command)}\n")
    tail: deque[str] = deque(maxlen=TAIL)
    began, shown, terminal = time.monotonic(), -1, sys.stdout.isatty()
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            tail.append(line)
            if counted := PROGRESS.match(line):
                done, total, percent = counted.groups()
                share = int(percent) if percent else 100 * int(done) // int(total)
                if share != shown and (terminal or share // 10 > shown // 10):
                    shown = share
                    said = f"{what}: {share:3d}%, {time.monotonic() - began:.0f} s"
                    print(f"\r{said}" if terminal else said, end="" if terminal else "\n", flush=True)
    if shown >= 0 and terminal:
        print()
    if process.returncode != 0:
        raise SetupError(f"{what}: failed; all of its output is in {log.name}\n{''.join(tail)}")


if __name__ == "__main__":
    sys.exit(main())
