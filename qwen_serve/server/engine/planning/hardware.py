"""Detects this machine's processor cores, free memory and NVIDIA cards."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def physical_cores() -> int:
    """Physical cores that this process may use, within its affinity and CPU quota."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_core(cpu) for cpu in allowed}
    return max(1, min(len(cores), int(_cpu_quota() or len(cores))))


def _core(cpu: int) -> str:
    siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return _read(siblings) or str(cpu)


def _cpu_quota() -> float | None:
    quota, _, period = _read(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    return max(1.0, int(quota) / int(period)) if quota.isdigit() and period.isdigit() else None


def available_memory() -> int | None:
    """Bytes of host memory available without swapping, within the control group's limit; None if unknown."""
    lines = _read(Path("/proc/meminfo")).splitlines()
    candidates = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    limit, used = _read(Path("/sys/fs/cgroup/memory.max")), _read(Path("/sys/fs/cgroup/memory.current"))
    if limit.isdigit() and used.isdigit():
        candidates.append(max(0, int(limit) - int(used) + _page_cache()))
    return min(candidates, default=None)


def _page_cache() -> int:
    for line in _read(Path("/sys/fs/cgroup/memory.stat")).splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0


def nvidia_cards() -> list[str]:
    """Names of the NVIDIA cards that the driver lists, whether or not this build can use them."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        return [line.strip() for line in listed.stdout.splitlines() if line.strip()]
    except (OSError, subprocess.SubprocessError):
        cards = Path("/proc/driver/nvidia/gpus")
        return ["NVIDIA card"] * len(list(cards.iterdir())) if cards.is_dir() else []


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
