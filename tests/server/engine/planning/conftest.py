from typing import Any

import pytest

from qwen_serve.llamacpp import Device
from qwen_serve.server.engine.planning import devices, plan
from tests.server.engine.planning.cards import GIB, MIB, NO_ROWS, pretend_copies, share_snapshots


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend that there are GPUs with so many bytes free, 32 GiB of host memory, and of the patches that
    sizes depend on shared-snapshots alone."""
    pretend_copies(monkeypatch, pay=False)
    share_snapshots(monkeypatch, True)
    monkeypatch.setattr(plan, "READS_OWN_CELLS", False)
    monkeypatch.setattr(plan, "takes_rows", lambda name, ggml_type, width: ggml_type != NO_ROWS)

    def pretend(*free: int) -> None:
        found = [
            Device(f"CUDA{i}", "NVIDIA A10G", is_gpu=True, free=bytes_, total=24 * GIB)
            for i, bytes_ in enumerate(free)
        ]
        found.append(Device("CPU", "a processor", is_gpu=False, free=32 * GIB, total=64 * GIB))
        buffers = {f"CUDA{i}": 300 * MIB for i in range(len(free))}
        monkeypatch.setattr(devices, "devices", lambda: found)
        monkeypatch.setattr(devices, "available_memory", lambda: None)
        monkeypatch.setattr(plan, "profile_run", lambda *_: {**buffers, "CUDA_Host": 20 * MIB})

    return pretend


@pytest.fixture
def own_cells(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate the patches for steps that read only their own cells."""
    monkeypatch.setattr(plan, "READS_OWN_CELLS", True)
