"""Errors for invalid settings name the setting."""

from pathlib import Path
from typing import Any

import pytest

from qwen_serve.server.engine import EngineSettings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_gpu_layers", -2),
        ("ctx_size", -1),
        ("parallel", 0),
        ("parallel", 257),
        ("max_queue", -1),
        ("batch_size", -1),
        ("batch_size", 4),
        ("ubatch_size", -1),
        ("threads", -1),
        ("threads_batch", 10_000),
        ("prefill_seconds", 0),
        ("prefill_seconds", float("inf")),
        ("draft_max", 0),
        ("draft_window", 0),
        ("mixed_steps", True),
        ("flash_attn", "maybe"),
        ("sampling", "gpu"),
        ("cache_type_k", "q3_k"),
        ("cache_type_v", "int8"),
        ("state_type", "q8_0"),
    ],
)
def test_nonsense_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        EngineSettings(model=Path("a.gguf"), **{field: value})


def test_a_batch_that_is_left_open_suits_any_number_of_sequences() -> None:
    for parallel in (1, 8, 256):
        assert EngineSettings(model=Path("a.gguf"), parallel=parallel).batch_size == 0
    with pytest.raises(ValueError, match=r"batch_size is 7.*at least parallel \(8\)"):
        EngineSettings(model=Path("a.gguf"), batch_size=7, parallel=8)
    EngineSettings(model=Path("a.gguf"), batch_size=8, parallel=8)


def test_a_packed_value_cache_needs_flash_attention() -> None:
    with pytest.raises(ValueError, match="flash"):
        EngineSettings(model=Path("a.gguf"), cache_type_v="q8_0", flash_attn="off")
    EngineSettings(model=Path("a.gguf"), cache_type_v="q8_0", flash_attn="auto")


def test_states_in_bf16_are_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"(?s)state_type.*8 bits.*f16"):
        EngineSettings(model=Path("a.gguf"), state_type="bf16")
    assert EngineSettings(model=Path("a.gguf")).state_type == "f32"


def test_threads_are_counted_by_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwen_serve.server.engine.settings.physical_cores", lambda: 3)
    EngineSettings(model=Path("a.gguf"), threads=12, threads_batch=12)
    with pytest.raises(ValueError, match=r"(?s)threads.*at most 12, 4 for each physical core"):
        EngineSettings(model=Path("a.gguf"), threads=13)


def test_a_changed_copy_is_checked_again() -> None:
    settings = EngineSettings(model=Path("a.gguf"), parallel=4)
    assert settings.replace(parallel=5) == EngineSettings(model=Path("a.gguf"), parallel=5)
    assert settings.parallel == 4
    with pytest.raises(ValueError, match="parallel"):
        settings.replace(parallel=0)
    with pytest.raises(ValueError, match="paralel"):
        settings.replace(paralel=3)
