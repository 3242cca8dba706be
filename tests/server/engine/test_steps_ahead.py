"""Launching a step before the rows of the previous one are read changes no answer."""

import asyncio
import random
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qwen_serve.llamacpp import HAS_BATCH_INVARIANCE
from qwen_serve.llamacpp.errors import LlamaError, NoMemorySlot
from qwen_serve.llamacpp.row_results import Status
from qwen_serve.llamacpp.row_sampler import HAS_ROW_SAMPLER
from qwen_serve.server.engine import (
    Engine,
    EngineDead,
    GenerateRequest,
    GenerationError,
    SamplingParams,
    ThinkingLimits,
)
from tests.server.engine.helpers import (
    Question,
    ask,
    ask_all,
    ask_at_once,
    idle,
    random_prompt,
    running,
    submit,
    told,
)
from tests.server.engine.launching import ENDS, PLAIN, ahead, assert_right
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not HAS_ROW_SAMPLER, reason="this llama.cpp has no row sampler")

INVARIANT = pytest.mark.skipif(not HAS_BATCH_INVARIANCE, reason="llama.cpp is built without batch-invariant")

BRIDGE = (300, 301, 3609, 302)
"""Closes a think block; 3609 is </think>."""


def requests(rng: random.Random, n: int, *, sampled: bool) -> list[Question]:
    """Requests that come, end and leave at different times."""
    made = []
    for _ in range(n):
        prompt = random_prompt(rng, rng.randrange(2, 60))
        kind = rng.randrange(12)
        params = SamplingParams(ignore_eos=True) if kind > 3 else ENDS
        if sampled and kind == 11:
            params = SamplingParams(ignore_eos=True, temperature=0.7, top_k=20, seed=rng.randrange(100))
        leaves = rng.randrange(1, 20) if rng.random() < 0.2 else None
        made.append(Question(prompt, rng.randrange(1, 40), rng.random() * 0.2, leaves, params))
    return made


async def test_answers_are_those_of_steps_that_wait(nano_f32: Path) -> None:
    prompts = [random_prompt(random.Random(i), 5 + 7 * i) for i in range(4)]
    asked = [Question(prompt, 24 + 3 * i) for i, prompt in enumerate(prompts)]
    with running(nano_f32, **PLAIN) as engine:
        expected = [await ask(engine, request) for request in asked]
    with ahead(nano_f32) as (engine, launched):
        assert await ask_all(engine, asked) == expected
        assert launched["again"] > 10
        assert [await ask(engine, request) for request in asked] == expected
        await idle(engine)
        assert engine.stats().running == 0


@pytest.mark.parametrize("seed", range(2))
async def test_whatever_comes_and_goes(nano_f32: Path, seed: int) -> None:
    rng = random.Random(seed)
    asked = requests(rng, 24, sampled=seed > 0)
    with running(nano_f32, **PLAIN) as engine:
        expected = [await ask(engine, request) for request in asked]
    with ahead(nano_f32, ctx_size=512) as (engine, launched):
        found = await ask_all(engine, asked)
        assert launched["again"]
        assert_right(asked, found, expected)
        await idle(engine)
        engine.components.cache.trim()
        states = engine.components.states
        assert states.cells.used == states.cells.idle


async def thinking(engine: Engine, limits: ThinkingLimits, params: SamplingParams) -> tuple[list[int], int]:
    """An answer that begins with thoughts, and how many tokens these have."""
    prompt = engine.prompt(random_prompt(random.Random(10), 20))
    generation = engine.submit(GenerateRequest(prompt, params, 60, thinking=limits))
    tokens = [token async for new in generation for token in new]
    await idle(engine)  # a step may still be computed that goes beyond the end
    assert generation.request.thinking is not None
    return tokens, generation.request.thinking.tokens


@pytest.mark.parametrize(
    ("limits", "params", "waits"),
    [
        (ThinkingLimits(), SamplingParams(ignore_eos=True), 2),
        (ThinkingLimits(), ENDS, 2),
        (ThinkingLimits(BRIDGE, 25), SamplingParams(ignore_eos=True), 5),
        (ThinkingLimits(BRIDGE, loop_guard=True), SamplingParams(ignore_eos=True), 2),
    ],
    ids=["no limits", "no limits, to its end", "a budget", "a guard"],
)
async def test_thoughts_run_ahead_until_their_limit_is_near(
    nano_f32: Path, limits: ThinkingLimits, params: SamplingParams, waits: int
) -> None:
    """Only the step before a check of the limits, and the last of an answer, are waited for."""
    with running(nano_f32, **PLAIN) as engine:
        expected = await thinking(engine, limits, params)
    with ahead(nano_f32) as (engine, launched):
        assert await thinking(engine, limits, params) == expected
        assert launched["again"] >= len(expected[0]) - len(BRIDGE) * (limits.budget is not None) - waits


async def test_prompts_are_read_behind_prompts_that_end(nano_f32: Path) -> None:
    """Each pass has two of four prompts, with a row of each."""
    asked = [Question(random_prompt(random.Random(i), 64), 12) for i in range(4)]
    with running(nano_f32, **PLAIN) as engine:
        expected = [await ask(engine, request) for request in asked]
    with ahead(nano_f32, prefix_cache=False, ubatch_size=128) as (engine, launched):
        assert await ask_at_once(engine, asked) == expected
        assert launched["prompts"] == 1


async def test_a_state_that_went_on_is_kept_with_the_end_of_its_answer(nano_f32: Path) -> None:
    prompt = random_prompt(random.Random(10), 20)
    with ahead(nano_f32) as (engine, launched):
        answer = await ask(engine, Question(prompt, 200, params=ENDS))
        assert answer.finish_reason == "stop"
        assert launched["again"] > len(answer.tokens) // 2
        [end] = [token for token in engine.vocab.eog_ids if token == engine.vocab.eos_id]
        known = [*prompt, *answer.tokens, end]
        following = submit(engine, Question([*known, *range(300, 320)], 8))
        tokens = [token async for new in following for token in new]
        assert following.request.cached_tokens == len(known)
    with running(nano_f32, **PLAIN, prefix_cache=False) as engine:
        assert (await ask(engine, Question([*known, *range(300, 320)], 8))).tokens == tokens


async def test_logits_that_are_no_use_while_the_next_step_is_computed(
    nano_f32: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sequences start again, from cleared cells."""
    asked = [Question(random_prompt(random.Random(i), 20), 24) for i in range(3)]
    with running(nano_f32, **PLAIN) as engine:
        expected = [await ask(engine, request) for request in asked]
    with ahead(nano_f32) as (engine, _):
        steps, taking = engine.components.context.row_steps, engine._step_loop  # noqa: SLF001 - as in `ahead`
        assert steps is not None
        compute, spoilt = steps.results, list[int]()

        def spoil() -> Any:
            found = compute()
            if taking.ahead and len(found) == 3 and not spoilt:
                found.statuses[1] = Status.NOT_FINITE
                spoilt.append(1)
            return found

        monkeypatch.setattr(steps, "results", spoil)
        assert await ask_at_once(engine, asked) == expected
        assert spoilt
        assert engine.stats().preemptions >= 3


async def test_no_cells_for_the_next_step(nano_f32: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step is launched after the previous one was read."""
    request = Question(random_prompt(random.Random(1), 20), 24)
    with running(nano_f32, **PLAIN) as engine:
        expected = await ask(engine, request)
    with ahead(nano_f32) as (engine, launched):
        context = engine.components.context
        decode, refused = context.decode, list[int]()

        def full(n_tokens: int, *, next_rows: Any = None, **how: Any) -> None:
            if next_rows is not None and len(refused) < 2:
                refused.append(n_tokens)
                raise NoMemorySlot("no cells")
            decode(n_tokens, next_rows=next_rows, **how)

        monkeypatch.setattr(context, "decode", full)
        assert await ask(engine, request) == expected
        assert len(refused) == 2
        assert launched["again"] > 10


@INVARIANT
@pytest.mark.parametrize("chunk", [0, 64])
async def test_deterministic_answers_keep_their_bits(nano_q4_k_m: Path, chunk: int) -> None:
    """Greedy ones, and the log-probabilities of others, which are waited for. `chunk`: prompts are cut at its
    multiples, as on a GPU."""
    rng = random.Random(chunk)
    scored = SamplingParams(ignore_eos=True, logprobs=2)
    seeded = SamplingParams(temperature=0.8, top_k=20, seed=5, ignore_eos=True, logprobs=2)
    shared = random_prompt(rng, 130)
    asked = [
        Question([*shared[: 64 * (i % 3)], *random_prompt(rng, 1 + 23 * i)], 6 + 7 * i, rng.random() / 4)
        for i in range(10)
    ]
    asked += [
        Question(random_prompt(rng, 64), 30, rng.random() / 4, None, how) for how in (ENDS, scored, seeded)
    ]
    options: dict[str, Any] = {"deterministic": True, "ctx_size": 4 * 512, "prefill_budget": chunk}

    def answer(engine: Engine, request: Question) -> Awaitable[object]:
        return ask(engine, request) if request.params.logprobs is None else told(engine, request)

    with running(nano_q4_k_m, **{**PLAIN, **options}, async_scheduling=False, prefix_cache=False) as engine:
        alone = [await answer(engine, request) for request in asked]
    with ahead(nano_q4_k_m, **options) as (engine, launched):
        for _ in range(2):
            leaving = Question(random_prompt(rng, 20), 40, rng.random() / 4, cancel_after=9)
            found = await asyncio.gather(*(answer(engine, one) for one in asked), ask(engine, leaving))
            assert found[: len(asked)] == alone
        assert launched["again"] > 10
        assert launched["prompts"]
        await idle(engine)
        reproducible = engine.components.scheduler.reproducible
        assert reproducible is not None
        assert reproducible.chunk == (chunk or 1)
        assert not reproducible.alone


@INVARIANT
async def test_slots_that_do_not_follow_each_other_are_two_passes(nano_q4_k_m: Path) -> None:
    """With cells of their own. Only the tokens of a single pass can be read on the device."""
    prompts = [random_prompt(random.Random(i), 20) for i in range(3)]
    lengths = (60, 2, 60)  # the second slot is free for most of the time
    asked = [Question(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
    options: dict[str, Any] = {"deterministic": True, "parallel": 3, "ctx_size": 3 * 512}
    with running(nano_q4_k_m, **{**PLAIN, **options}, async_scheduling=False) as engine:
        alone = [await ask(engine, request) for request in asked]
    with ahead(nano_q4_k_m, **options) as (engine, launched):
        assert await ask_at_once(engine, asked) == alone
        assert launched["again"] < 10
        launched.clear()
        assert await ask_at_once(engine, asked[::2]) == alone[::2]
        assert launched["again"] > 50


async def test_who_waits_for_the_step_ahead_is_told_that_it_failed(
    nano_f32: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ahead(nano_f32) as (engine, launched):
        steps = engine._step_loop  # noqa: SLF001 - a step that fails as it is waited for
        step = steps.step

        def fail_at_last(*, last: bool = False) -> Any:
            if last:
                raise LlamaError("llama_decode returned -3")
            return step()

        monkeypatch.setattr(steps, "step", fail_at_last)
        answer = asyncio.ensure_future(ask(engine, Question([300, 301], 1000)))
        await asyncio.to_thread(wait_until, lambda: launched["again"] > 2)
        waiting = engine.between_steps(lambda: "done")
        with pytest.raises(EngineDead, match="returned -3"):
            await asyncio.wait_for(asyncio.wrap_future(waiting), 60)
        with pytest.raises(GenerationError, match="returned -3"):
            await answer


async def test_switched_off(nano_f32: Path) -> None:
    asked = [Question(random_prompt(random.Random(i), 20), 12) for i in range(3)]
    with ahead(nano_f32, async_scheduling=False) as (engine, launched):
        answers = await ask_all(engine, asked)
    assert [len(answer.tokens) for answer in answers] == [12] * 3
    assert not launched


def drawing(seed: int, **changes: Any) -> SamplingParams:
    return SamplingParams(ignore_eos=True, temperature=0.8, top_p=0.95, top_k=20, seed=seed, **changes)


def mixed_requests(rng: random.Random, n: int) -> list[Question]:
    """Most draw, some are greedy."""
    made = requests(rng, n, sampled=True)
    for i, request in enumerate(made):
        kind = rng.randrange(16)
        if kind < 11:
            ends = rng.random() < 0.5
            params = SamplingParams(
                ignore_eos=not ends,
                temperature=rng.choice([0.3, 1.0, 1.5]),
                top_k=rng.choice([0, 1, 2, 20, 50]),
                top_p=rng.choice([0.5, 0.95, 1.0]),
                min_p=rng.choice([0.0, 0.1, 1.0]),
                seed=rng.randrange(100),
            )
            made[i] = replace(request, params=params)
        elif kind == 11:
            made[i] = replace(request, params=drawing(i, presence_penalty=1.5))
        elif kind == 12:
            made[i] = replace(request, params=drawing(i, mirostat=2))
    return made


@pytest.mark.parametrize("model", ["nano_f32", "nano_q4_k_m"])
async def test_draws_run_ahead(model: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(model)
    asked = [Question(random_prompt(random.Random(i), 5 + 7 * i), 40, params=drawing(i)) for i in range(4)]
    asked[2] = replace(asked[2], params=SamplingParams(ignore_eos=True))
    with running(path, **PLAIN) as engine:
        alone, together = [await ask(engine, one) for one in asked], await ask_at_once(engine, asked)
    with ahead(path) as (engine, launched):
        assert [await ask(engine, one) for one in asked] == alone
        assert launched["again"] > 4 * 35
        launched.clear()
        assert await ask_at_once(engine, asked) == together
        assert launched["again"] > 30


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_is_drawn(nano_f32: Path, seed: int) -> None:
    """Also in answers that continue those."""
    asked = mixed_requests(random.Random(seed), 24)
    with running(nano_f32, **PLAIN, prefix_cache=False) as engine:
        expected = [await ask(engine, request) for request in asked]
        ended = [(one, answer) for one, answer in zip(asked, expected, strict=True) if answer.finish_reason]
        more = [Question([*one.prompt, *answer.tokens, 300, 301], 6) for one, answer in ended]
        continued = [await ask(engine, request) for request in more]
    with ahead(nano_f32, ctx_size=1024) as (engine, launched):
        found = await ask_all(engine, asked)
        assert_right(asked, found, expected)
        assert await ask_all(engine, more) == continued
        await idle(engine)
        assert launched["again"] > 20
        engine.components.cache.trim()
        states = engine.components.states
        assert states.cells.used == states.cells.idle
