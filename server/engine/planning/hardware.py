"""Detects this machine's processor cores, free memory and NVIDIA cards; settings for a GPU without one."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from qwen_serve.llamacpp import supports_gpu
from qwen_serve.llamacpp.errors import ModelLoadError

if TYPE_CHECKING:
    from qwen_serve.server.engine.settings import EngineSettings

log = logging.getLogger(__name__)


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


def check_without_gpu(settings: EngineSettings) -> None:
    """Raises ModelLoadError for settings that choose among GPUs, where none is used; warns about layers."""
    reason = "n_gpu_layers is 0"
    if settings.n_gpu_layers:
        reason = "llama.cpp finds no GPU" if supports_gpu() else "this llama.cpp has no GPU support"
    chosen = {"main_gpu": settings.main_gpu, "split_mode": settings.split_mode}
    for name, without in {"main_gpu": 0, "split_mode": "none"}.items():
        if chosen[name] != without:
            raise ModelLoadError(f"{name} is {chosen[name]!r}, but {reason}; leave {name} out")
    if settings.n_gpu_layers > 0:
        log.warning("n_gpu_layers is %d, but %s: all layers are on the CPU", settings.n_gpu_layers, reason)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
