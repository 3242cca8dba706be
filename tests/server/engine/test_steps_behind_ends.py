"""Steps are launched ahead although sequences end, and that changes no answer."""

import asyncio
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from qwen_serve.llamacpp import Model
from qwen_serve.llamacpp.row_sampler import HAS_ROW_SAMPLER
from qwen_serve.server.engine import SamplingParams
from tests.marks import slow_but
from tests.server.engine.helpers import Answer, Question, ask, ask_at_once, idle, random_prompt, running
from tests.server.engine.launching import ENDS, PLAIN, ahead, assert_right

pytestmark = [
    pytest.mark.skipif(not HAS_ROW_SAMPLER, reason="this llama.cpp has no row sampler"),
    pytest.mark.usefixtures("ends_often"),
]


@pytest.fixture
def ends_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens that nano chooses often end a generation, too."""
    ends = Model.eog_ids.func  # type: ignore[attr-defined]  # of the cached property
    monkeypatch.setattr(Model, "eog_ids", property(lambda model: ends(model) | {13, 262}))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(ignore_eos=True),
        ENDS,
        SamplingParams(ignore_eos=True, temperature=1.0, top_k=20, seed=3),
    ],
    ids=["lengths", "ends", "drawn"],
)
async def test_each_step_behind_an_end_is_launched_ahead(nano_f32: Path, params: SamplingParams) -> None:
    """All but the first step, which reads the prompts. An end by length is known before the step of the last
    token, any other one after the next step was launched."""
    lengths = [12, 18, 24, 30, 36, 42, 90, 90]
    asked = [
        Question(random_prompt(random.Random(i), 20), length, params=params)
        for i, length in enumerate(lengths)
    ]
    with running(nano_f32, **PLAIN) as engine:
        expected = [await ask(engine, request) for request in asked]
    with ahead(nano_f32, parallel=8, prefix_cache=False) as (engine, launched):
        assert await ask_at_once(engine, asked) == expected
        await idle(engine)
        known = Counter(answer.finish_reason for answer in expected)
        assert (known["stop"] > 3) == (params is ENDS)
        behind = launched.pop("behind an end")
        assert (behind > 2) == (params is ENDS)
        assert launched.total() == engine.stats().steps - 1
        assert launched["first"] == 1
        assert launched["fewer"] > 3


@pytest.mark.parametrize("draws", [0.0, 0.2])
@pytest.mark.parametrize("seed", slow_but([0], range(8)))
async def test_clients_that_ask_again_when_they_have_an_answer(
    nano_f32: Path, seed: int, draws: float
) -> None:
    """So requests come behind ends of all kinds. There are too few slots and cells for all."""
    rng = random.Random(seed)
    asked = [
        Question(
            random_prompt(rng, rng.randrange(2, 60)),
            rng.randrange(1, 60) if rng.random() < 0.8 else 160,
            cancel_after=rng.randrange(1, 20) if rng.random() < 0.1 else None,
            params=SamplingParams(
                ignore_eos=rng.random() < 0.4,
                temperature=1.0 if rng.random() < draws else 0.0,
                top_k=20,
                seed=rng.randrange(100),
                stop_token_ids=frozenset({11} if rng.random() < 0.03 else ()),
            ),
        )
        for _ in range(60)
    ]
    with running(nano_f32, **PLAIN) as engine:
        expected = [await ask(engine, replace(request, cancel_after=None)) for request in asked]
    found: dict[int, Answer] = {}
    with ahead(nano_f32, ctx_size=512, parallel=8) as (engine, launched):

        async def client(first: int) -> None:
            for i in range(first, len(asked), 10):
                found[i] = await ask(engine, asked[i])

        await asyncio.gather(*map(client, range(10)))
        await idle(engine)
        assert_right(asked, [found[i] for i in range(len(asked))], expected)
        assert launched["again"] > 10
        engine.components.cache.trim()
        states = engine.components.states
        assert states.cells.used == states.cells.idle
