"""Steps that are timed before the first request leave nothing behind."""

from pathlib import Path

import pytest

from qwen_serve.llamacpp.row_sampler import HAS_ROW_SAMPLER
from qwen_serve.server.engine.warmup import time_verification
from tests.server.engine.helpers import Question, ask, running


@pytest.mark.skipif(not HAS_ROW_SAMPLER, reason="this llama.cpp launches no step ahead")
async def test_timed_verifications_change_no_answer(nano_f32: Path) -> None:
    request = Question([*range(300, 340)], 8)
    with running(nano_f32, parallel=3, ctx_size=1024, speculation="off") as engine:
        expected = await ask(engine, request)
        parts = engine.components
        assert time_verification(parts.context, parts.runner, parts.vocab, parts.clock, 2, 5) > 0
        assert (await ask(engine, request)).tokens == expected.tokens
