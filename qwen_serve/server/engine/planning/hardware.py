"""Detects this machine's processor cores, free memory and NVIDIA cards."""

import os
import resource
import subprocess
from pathlib import Path

FOR_THREADS = 512 * 1024**2
"""Bytes of a limited address space that are left to stacks and heaps of threads to come, which reserve more
than they use."""


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
    """Bytes of host memory available without swapping, within the limits of the control group and of this
    process; None if unknown."""
    return min((n_bytes for n_bytes, _ in _bounds()), default=None)


def bounded_by() -> str:
    """What bounds the available memory, if it is not the machine; else empty."""
    return min(_bounds(), default=(0, ""))[1]


def _bounds() -> list[tuple[int, str]]:
    """Bytes available within each limit, and its name."""
    lines = _read(Path("/proc/meminfo")).splitlines()
    found = [(int(line.split()[1]) * 1024, "") for line in lines if line.startswith("MemAvailable:")]
    limit, used = _read(Path("/sys/fs/cgroup/memory.max")), _read(Path("/sys/fs/cgroup/memory.current"))
    if limit.isdigit() and used.isdigit():
        found.append((max(0, int(limit) - int(used) + _page_cache()), "the control group's memory.max"))
    return found + _limits()


def _limits() -> list[tuple[int, str]]:
    lines = (line.split() for line in _read(Path("/proc/self/status")).splitlines())
    used = {words[0]: int(words[1]) * 1024 for words in lines if words[0] in ("VmSize:", "VmData:")}
    kinds = (("VmSize:", resource.RLIMIT_AS, "ulimit -v"), ("VmData:", resource.RLIMIT_DATA, "ulimit -d"))
    return [
        (max(0, limit - used[name] - FOR_THREADS), said)
        for name, kind, said in kinds
        if name in used and (limit := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY
    ]


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
