"""One configuration for building llama-cpp-python: CMake's options, and the name of the cached wheel.

Needs only the standard library, because it runs before anything is installed.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import sys
import tomllib
from pathlib import Path

from qwen_serve.server import cuda_wheels
from qwen_serve.server.about import data_folder
from qwen_serve.server.build_machine import cards, first_line, nvcc, processor

PACKAGE = "llama-cpp-python"
SOURCES = (".c", ".cpp", ".cu", ".cuh", ".h", ".inc")
"""Of the files in `native/`, those that a compiler reads."""


class SetupError(Exception):
    """The setup failed; the message is for the user of the command."""


class Build:
    """One build configuration on this machine. Builds with the same `key` give the same result."""

    def __init__(
        self, *, cuda: bool, cards: str, patched: bool, native: bool, cuda_from_wheels: bool = False
    ) -> None:
        """
        Args:
            cuda_from_wheels: with the toolkit of `cuda_wheels`, which need not be fetched yet.
            cards: CUDA architectures such as "86;89".
            patched: with the patches of `patches/llama.cpp`.
            native: for exactly this processor, else for any of its kind.

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
        """Everything that determines the libraries."""
        return {
            "package": self.requirement,
            "backend": self.backend,
            "patches": sources_digest() if self.patched else "none",
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
        if self.cuda_from_wheels:  # a cached wheel is found without the toolkit
            return cuda_wheels.TOOLKIT
        return first_line(str(self._nvcc), "--version", line=-1)

    @property
    def key(self) -> str:
        """A folder name: version, backend, and a digest of all parts."""
        digest = hashlib.sha256(json.dumps(self.parts, sort_keys=True).encode()).hexdigest()[:16]
        return f"{self.requirement.partition('==')[2]}-{self.label}-{digest}"

    @property
    def label(self) -> str:
        """The readable part of the key."""
        return self.backend

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
        """CMake's arguments; CMAKE_ARGS of the environment comes last and overrides them."""
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
            # the stubs stand for the driver's libcuda, which a build machine may not have
            compiler = Path(str(self._nvcc))
            toolkit = (compiler if self.cuda_from_wheels else compiler.resolve()).parents[1]
            stubs = toolkit / "lib64" / "stubs"
            args += [
                "-DGGML_CUDA=ON",
                f"-DCMAKE_CUDA_COMPILER={self._nvcc}",
                f"-DCMAKE_CUDA_ARCHITECTURES={self.cards}",
                f"-DCMAKE_SHARED_LINKER_FLAGS=-Wl,-rpath-link,{stubs}",
            ]
            # otherwise CMake may take headers and libraries from /usr/local/cuda. If nvcc is a link to
            # ccache, there is no toolkit in its folder
            if self.cuda_from_wheels or (toolkit / "bin" / "nvcc").exists():
                args.append(f"-DCUDAToolkit_ROOT={toolkit}")
            if self.cuda_from_wheels:
                args.append(f"-DLLAMA_CUDA_LIBRARIES=../../{cuda_wheels.ROOT / 'lib'}")
        return [*args, *shlex.split(os.environ.get("CMAKE_ARGS", ""))]


def sources_digest() -> str:
    """Digest of what makes llama.cpp ours, 16 hexadecimal digits: the patches, their CMake files and the
    sources in `native/`."""
    patches, native = data_folder("patches"), data_folder("native")
    parts = {
        patches: [*patches.glob("*.cmake"), *(patches / "llama.cpp").glob("*.patch")],
        native: [path for path in native.rglob("*") if path.suffix in SOURCES],
    }
    digest = hashlib.sha256()
    for folder, files in parts.items():
        for path in sorted(files):
            name = f"{folder.name}/{path.relative_to(folder).as_posix()}"
            digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def requirement() -> str:
    """The pin, `llama-cpp-python==...`, from the checkout around this file, else from the installed
    package."""
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    if project.is_file():
        wanted: list[str] = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    else:
        wanted = importlib.metadata.requires("qwen-serve") or []
    return next(line for line in wanted if line.startswith(f"{PACKAGE}=="))
