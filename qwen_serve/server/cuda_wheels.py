"""A CUDA toolkit from PyPI's wheels, for machines with a GPU and without NVIDIA's own packages.

The wheels contain the compiler, headers and libraries, but neither the links that a linker needs nor a stub
of the driver's libcuda. `complete` adds both. Needs only the standard library.
"""

import os
import platform
import re
import subprocess
import tempfile
from pathlib import Path

from qwen_serve.server.about import cache_folder

VERSION = "13.0.3.0"
TOOLKIT = f"cuda-toolkit[nvcc,cudart,cublas,cccl]=={VERSION}"
RUNTIME = f"cuda-toolkit[cudart,cublas]=={VERSION}"
"""The libraries that a build with `TOOLKIT` loads."""

ROOT = Path("nvidia", "cu13")
"""The folder of bin/, include/ and lib/ inside pip's target, such as site-packages."""

OLDEST_CARD = 75
"""CUDA 13 compiles for nothing below compute capability 7.5."""


def folder() -> Path:
    """The toolkit's folder in the cache, one for each processor architecture."""
    return cache_folder() / "cuda" / f"{VERSION}-{platform.machine()}"


def nvcc() -> Path:
    """The compiler's path, whether or not it has been fetched."""
    return folder() / ROOT / "bin" / "nvcc"


def too_old(cards: str) -> list[str]:
    """The capabilities in "61;86" or "61-real;86" that `VERSION` does not support."""
    named = ((card, re.match(r"\d+", card)) for card in cards.split(";"))
    return [card for card, number in named if number and int(number[0]) < OLDEST_CARD]


def complete(installed: Path) -> None:
    """Completes what `pip install --target installed TOOLKIT` left into a toolkit for CMake.

    Raises:
        OSError: a file of the wheels is missing, or the C compiler is.
        subprocess.CalledProcessError: the C compiler failed.
    """
    root = installed / ROOT
    for library in sorted((root / "lib").glob("lib*.so.*")):
        link = library.with_name(library.name.partition(".so.")[0] + ".so")
        if not link.exists():
            link.symlink_to(library.name)
    if not (root / "lib64").exists():
        (root / "lib64").symlink_to("lib")
    # Only libcuda.so, as in NVIDIA's packages: a libcuda.so.1 here could be loaded in place of the driver's.
    stub = root / "lib" / "stubs" / "libcuda.so"
    stub.parent.mkdir(exist_ok=True)
    header = (root / "include" / "cuda.h").read_text(encoding="utf-8", errors="replace")
    names = sorted(set(re.findall(r"\bcu[A-Z]\w*", header)))
    with tempfile.TemporaryDirectory() as work:
        source = Path(work) / "libcuda.c"
        source.write_text("".join(f"void {name}(void) {{}}\n" for name in names))
        compiler = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
        subprocess.run([*compiler, "-o", str(stub), str(source)], check=True, capture_output=True, text=True)
