"""Compilers, GPUs and processors of the machine that builds. Needs only the standard library."""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

NVCC = Path("/usr/local/cuda/bin/nvcc")


def nvcc() -> Path | None:
    """The path of CUDA's compiler."""
    found = shutil.which("nvcc")
    return Path(found) if found else NVCC if NVCC.is_file() else None


def cards() -> str:
    """Compute capabilities of the machine's GPUs, such as "86;90"; "" without a GPU."""
    said = output_of("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    found = {line.replace(".", "") for line in said.splitlines() if re.fullmatch(r"\d+\.\d+", line)}
    return ";".join(sorted(found))


def processor() -> str:
    """What -march=native depends on in the processor."""
    if sys.platform == "darwin":
        return output_of("sysctl", "-n", "machdep.cpu.brand_string").strip()
    about = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    wanted = r"(?m)^(?:cpu family|model|flags|Features|CPU (?:implementer|part))\s*:.*$"
    lines = re.findall(wanted, about)
    return f"{platform.machine()} {hashlib.sha256('|'.join(lines).encode()).hexdigest()[:16]}"


def processor_features() -> frozenset[str]:
    """The processor's features under Linux's names, such as avx512f or asimddp; empty on other systems."""
    if sys.platform != "linux":
        return frozenset()
    about = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    found = re.search(r"(?m)^(?:flags|Features)\s*:(.*)$", about)
    return frozenset(found[1].split()) if found else frozenset()


def processors() -> int:
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def first_line(*command: str, line: int = 0) -> str:
    """A line of a program's output; "" if there is no such program."""
    said = output_of(*command).strip().splitlines()
    return said[line] if said else ""


def output_of(*command: str) -> str:
    """A program's output; "" if it fails or is missing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""
