"""Detection of the machine's hardware, and the warning if its GPU would not be used."""

import logging
import os
import resource
from pathlib import Path

import pytest

from qwen_serve.server.engine import loading
from qwen_serve.server.engine.loading import resolve_settings
from qwen_serve.server.engine.planning import hardware
from tests.server.engine.helpers import settings


def test_cores_and_memory_are_within_reason() -> None:
    assert 1 <= hardware.physical_cores() <= (os.cpu_count() or 1)
    available = hardware.available_memory()
    assert available is None or available > 2**20


def test_hyperthreads_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"cpu{cpu}/topology": f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
    _pretend(monkeypatch, files, cpus=8)
    assert hardware.physical_cores() == 4


def test_a_cpu_quota_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, {"cpu.max": "250000 100000"}, cpus=8)
    assert hardware.physical_cores() == 2
    _pretend(monkeypatch, {"cpu.max": "max 100000"}, cpus=8)
    assert hardware.physical_cores() == 8


def test_a_memory_limit_counts_less_what_can_be_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "meminfo": "MemTotal: 9000000 kB\nMemAvailable:    8000000 kB",
        "memory.max": "1000000",
        "memory.current": "700000",
        "memory.stat": "anon 5\ninactive_file 200000",
    }
    _pretend(monkeypatch, files, cpus=1)
    assert hardware.available_memory() == 500_000
    _pretend(monkeypatch, {**files, "memory.max": "max"}, cpus=1)
    assert hardware.available_memory() == 8_000_000 * 1024


def test_limits_of_this_process_count(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "meminfo": "MemAvailable:    8000000 kB",
        "/proc/self/status": "Name: x\nVmSize:  1000000 kB\nVmData:  500000 kB",
    }
    _pretend(monkeypatch, files, cpus=1)
    limits = {resource.RLIMIT_AS: resource.RLIM_INFINITY, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], limits[kind]))
    assert (hardware.available_memory(), hardware.bounded_by()) == (8_000_000 * 1024, "")
    limits[resource.RLIMIT_AS] = 3_000_000 * 1024
    assert hardware.available_memory() == 2_000_000 * 1024 - hardware.FOR_THREADS
    assert hardware.bounded_by() == "ulimit -v"
    limits[resource.RLIMIT_DATA] = 1_500_000 * 1024
    assert hardware.available_memory() == 1_000_000 * 1024 - hardware.FOR_THREADS
    assert hardware.bounded_by() == "ulimit -d"
    limits[resource.RLIMIT_DATA] = 1024
    assert hardware.available_memory() == 0


def _pretend(monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cpus: int) -> None:
    def read(path: Path) -> str:
        return next((text for end, text in files.items() if end in str(path)), "")

    monkeypatch.setattr(hardware, "_read", read)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)), raising=False)


def test_an_idle_gpu_is_shouted_about(
    nano_f16: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading, "supports_gpu", lambda: False)
    monkeypatch.setattr(loading, "nvidia_cards", lambda: ["NVIDIA A10G"])
    resolve_settings(settings(nano_f16, n_gpu_layers=0))
    assert not caplog.records, "whoever asks for the CPU knows"
    resolve_settings(settings(nano_f16, n_gpu_layers=-1))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "NVIDIA A10G is present" in record.getMessage()


def test_a_core_is_left_to_everything_else(nano_f16: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "physical_cores", lambda: 8)
    decided = resolve_settings(settings(nano_f16, threads=0))
    assert (decided.threads, decided.threads_batch) == (7, 7)
    monkeypatch.setattr(loading, "physical_cores", lambda: 1)
    assert resolve_settings(settings(nano_f16, threads=0)).threads == 1
    assert resolve_settings(settings(nano_f16, threads=3)).threads_batch == 3
