"""A simulated GPU, and a model without a file."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from qwen_serve.llamacpp.gguf import Header, TensorInfo, Value
from qwen_serve.server.engine import EngineSettings, MemoryPlan
from qwen_serve.server.engine.planning import fit, plan
from qwen_serve.server.engine.planning.fit import plan_memory
from tests.server.engine.helpers import settings

MIB, GIB = 1024**2, 1024**3

FOUR_B: dict[str, Value] = {
    "general.architecture": "qwen35",
    "qwen35.block_count": 33,
    "qwen35.nextn_predict_layers": 1,
    "qwen35.context_length": 262_144,
    "qwen35.embedding_length": 2560,
    "qwen35.attention.head_count": 16,
    "qwen35.attention.head_count_kv": 4,
    "qwen35.attention.key_length": 256,
    "qwen35.attention.value_length": 256,
    "qwen35.full_attention_interval": 4,
    "qwen35.ssm.conv_kernel": 4,
    "qwen35.ssm.state_size": 128,
    "qwen35.ssm.group_count": 16,
    "qwen35.ssm.inner_size": 4096,
}
"""Qwen3.5-4B's sizes."""

PLAN = "qwen_serve.server.engine.planning.plan"

FILE = Path("4b.gguf")
STATUS = os.stat_result([0] * 10)

LAYERS = {f"blk.{i}.ffn_up.weight": 70 * MIB for i in range(33)}

NO_ROWS = 35
"""TQ2_0, of which CUDA takes no rows."""


def four_b() -> Header:
    return header_of({"token_embd.weight": 500 * MIB, "output_norm.weight": 10240, **LAYERS})


def header_of(sizes: Mapping[str, int]) -> Header:
    """A header with F32 tensors of these sizes in bytes."""
    tensors = {name: TensorInfo(name, (size // 4,), 0) for name, size in sizes.items()}
    return Header(FILE, STATUS, FOUR_B, tensors)


def share_snapshots(monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    for module in (plan, fit):
        monkeypatch.setattr(module, "SHARES_SNAPSHOTS", shared)


def pretend_copies(monkeypatch: pytest.MonkeyPatch, *, pay: bool, build: bool = True) -> None:
    """Simulate whether FP16 copies pay on every GPU, and whether this build can keep them."""
    monkeypatch.setattr(fit, "HAS_F16_COPIES", build)
    for module in (plan, fit):
        monkeypatch.setattr(module, "keeps_f16_copies", lambda _: pay and build)


def four_b_plan(**changes: Any) -> MemoryPlan:
    # What fits is decided without the file; `_profiled` is replaced.
    return plan_memory(EngineSettings(model=Path("4b.gguf"), threads=1, threads_batch=1, **changes), four_b())


def decided(model: Path, **changes: Any) -> EngineSettings:
    return settings(model, **{"threads_batch": 1, "prefill_budget": 64, **changes})
