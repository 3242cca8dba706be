"""Our own sources (native/) on a release that bump.py moves the patches to: upstream may have changed what
they use, and no merge tells."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bump_sources import run

NATIVE = Path(__file__).resolve().parents[1] / "native"
KERNELS = Path("ggml/src/ggml-cuda")


@dataclass
class Moved:
    """The new release's sources with the patches, the libraries built from them, and a folder for results."""

    sources: Path
    libraries: Path
    work: Path

    def masks(self) -> str:
        """The test of the mask. Returns how it went; raises BumpError if it does not compile."""
        program, libraries = self.work / "test-kv-mask", self.libraries.resolve()
        folders = [f"-I{self.sources / name}" for name in ("include", "ggml/include", "src")]
        linked = [f"-L{libraries}", "-lllama", "-lggml-base", f"-Wl,-rpath,{libraries}"]
        source = NATIVE / "tests" / "test-kv-mask.cpp"
        with (self.work / "test-kv-mask.log").open("w") as output:
            compiler = os.environ.get("CXX", "c++")
            run(output, compiler, "-std=c++17", "-O1", *folders, "-o", program, source, *linked)
        done = subprocess.run([program], capture_output=True, text=True, check=False)
        passed = done.returncode == 0 and re.search(r"\b[1-9]\d* masks are equal", done.stdout)
        return "masks are equal" if passed else "FAILED"

    def kernels(self) -> str:
        """The kernels, each compiled for one architecture. Returns which do not."""
        if (nvcc := shutil.which("nvcc")) is None:
            return "not compiled: no nvcc on PATH"
        own = sorted((NATIVE / KERNELS).glob("*.cu"))
        folders = [NATIVE / "ggml/src", NATIVE / KERNELS]
        folders += [self.sources / name for name in ("ggml/include", "ggml/src", KERNELS)]
        flags = ["-std=c++17", "-arch=sm_90", "-use_fast_math", "-w", *(f"-I{folder}" for folder in folders)]
        failed = []
        with (self.work / "kernels.log").open("w") as output:
            for source in own:
                command = [nvcc, *flags, "-cubin", source, "-o", self.work / "kernel.cubin"]
                done = subprocess.run(list(map(str, command)), stdout=output, stderr=output, check=False)
                failed += [source.name] * bool(done.returncode)
        return f"FAILED: {', '.join(failed)}" if failed else f"{len(own)} compiled"
