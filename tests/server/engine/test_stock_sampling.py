"""In a llama.cpp without our sampler, requests of every kind get the answers that they get with it."""

import random
from pathlib import Path
from typing import Any

import pytest

from qwen_serve.llamacpp import context, drafter, host_sampler
from qwen_serve.llamacpp.host_sampler import HostRowSteps
from qwen_serve.llamacpp.row_sampler import HAS_ROW_SAMPLER
from tests.marks import slow_but
from tests.server.engine.helpers import EXACT, Question, ask_at_once, random_prompt, running
from tests.server.engine.test_any_kind_ahead import GRAMMAR, KINDS, of

pytestmark = pytest.mark.skipif(not HAS_ROW_SAMPLER, reason="there is nothing to compare with")

SHAPES: dict[str, dict[str, Any]] = {
    "alone": {"speculation": "off"},
    "with drafts": {"speculation": "both", "draft_always": True},
    "in small pieces": {"speculation": "off", "ubatch_size": 16, "sampling": "device"},
}


@pytest.mark.parametrize("shape", slow_but(["with drafts"], SHAPES))
async def test_every_kind(shape: str, nano_f32: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    asked = [Question(random_prompt(rng, 9) * 3, 24, params=of(kind)) for kind in KINDS]
    asked.append(Question(random_prompt(rng, 20), 24, grammar=GRAMMAR))
    with running(nano_f32, **EXACT, **SHAPES["alone"]) as engine:
        expected = await ask_at_once(engine, asked)
    monkeypatch.setattr(host_sampler, "HAS_ROW_SAMPLER", False)
    monkeypatch.setattr(context, "HAS_ROW_SAMPLER", False)
    monkeypatch.setattr(drafter, "HAS_QUEUE", False)
    with running(nano_f32, **EXACT, **SHAPES[shape]) as engine:
        assert isinstance(engine.components.context.row_steps, HostRowSteps)
        assert await ask_at_once(engine, asked) == expected
        if shape == "with drafts":
            accepted = {name: stats.accepted for name, stats in engine.stats().drafts.items()}
            assert accepted.keys() == {"ngram", "mtp"}
            assert all(accepted.values())
