"""Wheels of the patched llama-cpp-python from a release, for machines without a compiler.

A released wheel fits any processor of a kind. Its name, `KEY.TAG.whl`, is derived from its inputs (the pinned
version, the patches and kernels, CMake's options); TAG is that of a wheel's file name. `qwen-serve setup`
computes the same name and looks it up in SHA256SUMS of the folder or URL in QWEN_SERVE_WHEELS. So it never
takes a wheel with other patches or kernels. `.ci/wheel` builds the wheels. This module needs only the
standard library.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlparse
from urllib.request import urlopen

from qwen_serve.server.about import WHEELS_VARIABLE, cache_folder, data_folder
from qwen_serve.server.build_machine import cards, nvcc, output_of, processor_features
from qwen_serve.server.llama_build import PACKAGE, Build, SetupError, requirement, sources_digest

RELEASES = ""
"""Default URL of a release's files; empty as long as the project has no public address."""

SUMS = "SHA256SUMS"
ANSWER_S = 8.0
"""Seconds for the list of wheels, from resolving the name to reading it; after that no wheel is taken."""
STALL_S = 15.0
"""Most seconds between two reads while a wheel is fetched."""
LIST_BYTES = 1 << 20

CUDA = "12.8"
CUDA_RUNTIME = f"cuda-toolkit[cudart,cublas]=={CUDA}.*"
"""The libraries that a CUDA wheel loads, from PyPI."""
CUDA_LIBRARIES = "../../nvidia/cuda_runtime/lib;$ORIGIN/../../nvidia/cublas/lib"
"""Their folders relative to llama_cpp/lib: two run path entries, which begin with $ORIGIN/."""
OLDEST_DRIVER = 525
"""Oldest driver, that of CUDA 12.0. It and later ones run code that CUDA 12.8 compiled for their GPUs."""
BROUGHT = ("libcuda.so.1", "libcudart.so.12", "libcublas.so.12", "libcublasLt.so.12")
"""Libraries from the driver and `CUDA_RUNTIME` that the wheel does not contain."""


@dataclass(frozen=True)
class Kind:
    """Processors that one wheel fits: `machine` with all `features`; `flags` for CMake."""

    name: str
    machine: str
    features: frozenset[str]
    flags: tuple[str, ...] = ()


_AVX2 = frozenset({"avx2", "bmi2", "f16c", "fma"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"}
KINDS = (
    Kind("x86_64-avx512", "x86_64", _AVX512, ("-DGGML_AVX512=ON", "-DGGML_AVX512_VNNI=ON")),
    Kind("x86_64", "x86_64", _AVX2),
    Kind(
        "aarch64",
        "aarch64",
        frozenset({"asimddp", "asimdhp"}),
        ("-DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod+fp16",),
    ),
    Kind("arm64", "arm64", frozenset()),
)
"""In order of preference: a machine takes the first that fits. arm64 is Apple's name, aarch64 Linux's."""


class NoWheel(Exception):
    """No wheel is used; the message says why and completes a sentence."""


class Released(Build):
    """A build for any processor of a kind. Its name does not depend on the compiler or the C library."""

    def __init__(self, kind: Kind, cards: str = "") -> None:
        """
        Args:
            cards: one CUDA architecture, or "" for none.
        """
        self.kind = kind
        self.requirement = requirement()
        self.patched, self.native, self.cuda_from_wheels = True, False, False
        self.cuda, self.cards = bool(cards), cards
        self._nvcc = nvcc() if cards else None
        self._patches = data_folder("patches")

    @classmethod
    def named(cls, label: str) -> Released:
        """The build of a label such as "cuda-86-x86_64". Raises SetupError."""
        match = re.fullmatch(r"(?:cpu|metal|cuda-(\d+))-(.+)", label)
        kind = next((one for one in KINDS if match and one.name == match[2]), None)
        if match is None or kind is None or (made := cls(kind, match[1] or "")).label != label:
            kinds = ", ".join(one.name for one in KINDS)
            raise SetupError(
                f"{label}: want cpu-KIND, cuda-CAPABILITY-KIND (Linux) or metal-KIND (macOS); KIND: {kinds}"
            )
        return made

    @property
    def label(self) -> str:
        """Backend and processors."""
        return f"{self.backend}-{self.kind.name}"

    @property
    def parts(self) -> dict[str, str]:
        """Its inputs, which every machine can compute."""
        return {
            "package": self.requirement,
            "backend": self.backend,
            "patches": sources_digest(),
            "processor": self.kind.name,
            "system": sys.platform,
            "nvcc": CUDA if self.cuda else "none",
            "cmake_args": " ".join(self._flags),
        }

    @property
    def _flags(self) -> list[str]:
        cuda = [f"-DLLAMA_CUDA_LIBRARIES={CUDA_LIBRARIES}"] if self.cuda else []
        return ["-DGGML_NATIVE=OFF", *self.kind.flags, *cuda]

    @property
    def cmake_args(self) -> list[str]:
        """Raises SetupError without nvcc, for CUDA."""
        if self.cuda and self._nvcc is None:
            raise SetupError(f"{self.label} needs CUDA {CUDA}'s nvcc on PATH")
        return [*super().cmake_args, *self._flags]

    @property
    def description(self) -> str:
        """Such as "with CUDA for compute capability 86, patched, for x86_64"."""
        chosen = f"with CUDA for compute capability {self.cards}" if self.cuda else ""
        chosen = chosen or {"cpu": "for the CPU", "metal": "with Metal"}[self.backend]
        return f"{chosen}, patched, of a release, for {self.kind.name}"


def place() -> str:
    """The folder or URL in QWEN_SERVE_WHEELS, else the project's release page; "" for none."""
    return os.environ.get(WHEELS_VARIABLE, RELEASES).strip()


def fitting(*, cuda: str, archs: str | None, patched: bool, native: bool) -> Released:
    """The build that fits this machine and the options, whether or not it exists.

    Args:
        cuda: --cuda: auto, 0, 1 or pypi.
        archs: --cuda-archs.
        patched: whether the patches are wanted; releases have only patched wheels.
        native: for this machine, else for as many of its kind as possible.

    Raises:
        NoWheel: no release has it.
    """
    if not patched:
        raise NoWheel("unpatched llama.cpp is built here (--patches 0)")
    if os.environ.get("CMAKE_ARGS"):
        raise NoWheel("CMAKE_ARGS asks for a build of its own")
    machine, features = platform.machine(), processor_features()
    kinds = [one for one in KINDS if one.machine == machine and one.features <= features]
    if not kinds:
        raise NoWheel(f"there is none for this {machine} processor (AVX2, or Arm with dotprod and fp16)")
    card = (archs or cards()) if cuda != "0" else ""
    if cuda in {"1", "pypi"} and not card:
        raise NoWheel("no card tells which CUDA wheel is wanted (--cuda-archs)")
    if not card or sys.platform == "darwin":
        return Released(kinds[0 if native else -1])
    if ";" in card or not card.isdigit():
        raise NoWheel(f"CUDA wheels are for one compute capability each, not {card}")
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split(".")[0]
    if driver.isdigit() and int(driver) < OLDEST_DRIVER:
        raise NoWheel(f"CUDA {CUDA} wants a driver of {OLDEST_DRIVER} or later, not {driver}")
    return Released(kinds[-1], card)  # one for each GPU architecture, since the processor matters little


def fetch(build: Released, where: str) -> Path:
    """Fetches the wheel from a folder or URL into the cache and verifies its checksum. Raises NoWheel."""
    folder = cache_folder() / "wheels" / build.key
    if kept := list(folder.glob("*.whl")):
        return kept[0]
    name, tag, wanted = listed(build, where)
    print(f"fetching {name} of {shown(where)}", flush=True)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder.parent) as work:
            version = build.requirement.partition("==")[2]
            made = Path(work) / "out" / f"{PACKAGE.replace('-', '_')}-{version}-{tag}.whl"
            made.parent.mkdir()
            found = _copied(_address(where, name), made)
            if found != wanted:
                raise NoWheel(
                    f"{name} of {shown(where)} has another checksum than its {SUMS} says; not taken"
                )
            if not folder.exists():
                made.parent.rename(folder)
    except (OSError, HTTPException) as error:
        raise NoWheel(f"{name} of {shown(where)}: {_reason(error)}") from error
    return next(folder.glob("*.whl"))


def listed(build: Released, where: str) -> tuple[str, str, str]:
    """A build's wheel in a folder or at a URL: name, tag and checksum, within ANSWER_S. Raises NoWheel."""

    def read() -> bytes:
        with urlopen(_address(where, SUMS), timeout=ANSWER_S) as answer:
            return bytes(answer.read(LIST_BYTES))

    try:
        text = _within(ANSWER_S, read).decode("utf-8", "replace")
    except (OSError, ValueError, HTTPException) as error:
        raise NoWheel(f"{SUMS} of {shown(where)}: {_reason(error)}") from error
    lines = re.findall(rf"(?m)^([0-9a-f]{{64}})\s+\*?({re.escape(build.key)}\.([\w.-]+)\.whl)\s*$", text)
    if not lines:
        raise NoWheel(f"{shown(where)} has no {build.key}")
    fits = [(name, tag, digest) for digest, name, tag in lines if _runs_here(tag)]
    if not fits:
        system = " ".join(platform.libc_ver()).strip() or platform.mac_ver()[0] or "an unknown C library"
        raise NoWheel(f"{lines[0][1]} of {shown(where)} wants a newer system than this ({system})")
    return fits[0]


def shown(where: str) -> str:
    """A folder or URL without user and password."""
    return re.sub(r"(?<=//)[^/@]*@", "", where)


def _runs_here(tag: str) -> bool:
    """Whether this system is new enough for a tag such as "py3-none-manylinux_2_28_x86_64" or
    "py3-none-macosx_13_0_arm64"."""
    needs = [(int(a), int(b)) for a, b in re.findall(r"(?:manylinux|macosx)_(\d+)_(\d+)_", tag)]
    if not needs:
        return True  # pip decides
    mac = sys.platform == "darwin"
    has = platform.mac_ver()[0] if mac else platform.libc_ver()[1] * (platform.libc_ver()[0] == "glibc")
    numbers = [int(number) for number in re.findall(r"\d+", has)]
    return numbers >= [*min(needs)]


def _reason(error: Exception) -> str:
    """A short reason for a failed transfer."""
    if isinstance(error, HTTPError):
        return f"{error.code} {error.reason}"
    cause = error.reason if isinstance(error, URLError) else error
    if isinstance(cause, TimeoutError):
        return "no answer in time"
    return str(getattr(cause, "strerror", None) or cause) or type(cause).__name__


def _address(where: str, name: str) -> str:
    if urlparse(where).scheme in {"http", "https", "file"}:
        return f"{where.rstrip('/')}/{quote(name)}"
    return (Path(where).expanduser().absolute() / name).as_uri()


def _copied(address: str, target: Path) -> str:
    """Copies a file. Returns its SHA-256; raises OSError."""
    with urlopen(address, timeout=STALL_S) as answer, target.open("wb") as out:
        shutil.copyfileobj(answer, out)
    with target.open("rb") as made:
        return hashlib.file_digest(made, "sha256").hexdigest()


def _within(seconds: float, call: Callable[[], bytes]) -> bytes:
    """The result of `call`, or its exception; TimeoutError after `seconds`, since a resolver has no
    timeout."""
    box: SimpleQueue[bytes | Exception] = SimpleQueue()

    def run() -> None:
        try:
            box.put(call())
        except Exception as error:  # for the caller
            box.put(error)

    Thread(target=run, daemon=True).start()
    try:
        got = box.get(timeout=seconds)
    except Empty:
        raise TimeoutError from None
    if isinstance(got, Exception):
        raise got
    return got
