"""A failure costs only its request. If the engine fails, all remaining requests get an error."""

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qwen_serve.llamacpp.errors import LlamaError, NoMemorySlot
from qwen_serve.server.engine import (
    Engine,
    EngineDead,
    GenerationError,
    SamplingParams,
)
from qwen_serve.server.engine.request import Request
from qwen_serve.server.engine.sampling import Sampler
from tests.server.engine.helpers import (
    EXACT,
    Question,
    ask,
    ask_at_once,
    idle,
    random_prompt,
    running,
    settings,
    standing_still,
    step_by_step,
)
from tests.server.engine.inside import at_rest
from tests.server.engine.test_engine import ENDLESS, PROMPT, ask_for, first, rest
from tests.waiting import wait_until


@pytest.fixture
def engine(nano_f32: Path) -> Iterator[Engine]:
    with running(nano_f32, **EXACT) as engine:
        yield engine


async def test_one_broken_sampler_breaks_one_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = await ask(engine, Question(PROMPT, 40))
    choose, calls = Sampler.choose, 0

    def sabotaged(self: Sampler, *arguments: Any) -> int | None:
        nonlocal calls
        if not self.params.is_greedy:
            calls += 1
            if calls == 10:
                raise RuntimeError("out of luck")
        return choose(self, *arguments)

    monkeypatch.setattr(Sampler, "choose", sabotaged)
    with standing_still(engine):
        broken = ask_for(engine, 40, params=replace(ENDLESS, temperature=1.0))
        healthy = ask_for(engine, 40)
    with pytest.raises(GenerationError, match="out of luck"):
        await rest(broken)
    assert await rest(healthy) == expected.tokens
    assert engine.ready
    assert engine.stats().kv_cells_used == engine.stats().prefix.resident_cells


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_can_not_be_taken_in_fails_alone(
    engine: Engine, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await ask(engine, Question(PROMPT, 40))

    class Picky(Sampler):
        def __init__(self, params: SamplingParams, *how: Any) -> None:
            if params.seed == 13:
                raise MemoryError("no room for a sampler")
            super().__init__(params, *how)

    monkeypatch.setattr("qwen_serve.server.engine.engine.Sampler", Picky)
    healthy = asyncio.create_task(ask(engine, Question(PROMPT, 40)))
    broken = ask_for(engine, 40, params=replace(ENDLESS, seed=13), stream=stream)
    with pytest.raises(GenerationError, match="no room for a sampler"):
        await rest(broken)
    assert await healthy == expected
    assert engine.ready
    assert await ask(engine, Question(PROMPT, 40)) == expected
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.finished) == (0, 0, {"length": 3, "error": 1})


async def test_a_prompt_that_the_scheduler_refuses_fails_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, add = await ask(engine, Question(PROMPT, 40)), engine.components.scheduler.add

    def picky(sequence: Request) -> None:
        if sequence.prompt_length == 7:
            raise RuntimeError("no room to remember it")
        add(sequence)

    monkeypatch.setattr(engine.components.scheduler, "add", picky)
    healthy = asyncio.create_task(ask(engine, Question(PROMPT, 40)))
    with pytest.raises(GenerationError, match="no room to remember it"):
        await rest(ask_for(engine, 40, prompt=PROMPT[:7]))
    assert await healthy == expected
    assert engine.ready
    await idle(engine)
    assert at_rest(engine)


@pytest.mark.parametrize("where", ["at once", "as its state is kept"])
async def test_a_request_that_can_not_be_cancelled_fails_alone(
    engine: Engine, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever that goes wrong: the others get their answers, and its place is free."""
    expected = await ask(engine, Question(PROMPT, 200))
    before = engine.stats()
    parts = engine.components
    owner, name = {
        "at once": (engine.components.scheduler, "remove"),
        "as its state is kept": (parts.cache, "cache_finished"),
    }[where]
    original, failures = getattr(owner, name), 0

    def fail_once(*what: Any, **how: Any) -> Any:
        nonlocal failures
        if not failures:
            failures += 1
            raise LlamaError("no such cell")
        return original(*what, **how)

    with step_by_step(engine) as grant:
        healthy = asyncio.create_task(ask(engine, Question(PROMPT, 200)))
        await asyncio.sleep(0)
        broken = ask_for(engine, 100, prompt=PROMPT[::-1])
        grant(8)
        monkeypatch.setattr(owner, name, fail_once)
        broken.cancel()
    with suppress(GenerationError):  # it may be told, or have its will
        await asyncio.wait_for(rest(broken), 30)
    assert await asyncio.wait_for(healthy, 30) == expected
    await idle(engine)
    assert failures == 1
    assert engine.ready
    assert at_rest(engine)
    assert [await ask(engine, Question(PROMPT, 200)) for _ in range(5)] == [expected] * 5
    assert engine.stats().finished["length"] == before.finished["length"] + 6


async def test_when_the_engine_fails_everybody_is_told(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = ask_for(engine, 1000)
    await first(one)

    def fail(_n: int, **_: object) -> None:
        raise LlamaError("llama_decode returned -3")

    two = ask_for(engine, 1000)
    monkeypatch.setattr(engine.components.context, "decode", fail)
    for generation in (one, two):
        with pytest.raises(GenerationError, match="returned -3"):
            await rest(generation)
    assert not engine.ready
    with pytest.raises(EngineDead, match="returned -3"):
        ask_for(engine, 1)
    with pytest.raises(EngineDead):
        engine.wait_ready()
    assert engine.stats().finished == {"error": 2}


async def test_whoever_ends_as_the_engine_fails_is_told(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise LlamaError("no such cell")

    monkeypatch.setattr(engine.components.scheduler, "remove", fail)
    with pytest.raises(GenerationError, match="no such cell"):
        await asyncio.wait_for(rest(ask_for(engine, 3)), 30)
    assert not engine.ready


def test_a_failing_warm_up_is_seen(nano_f32: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(settings(nano_f32))

    def fail(_n: int, **_: object) -> None:
        raise LlamaError("out of memory")

    monkeypatch.setattr(engine.components.context, "decode", fail)
    engine.start()
    with pytest.raises(EngineDead, match="out of memory"):
        engine.wait_ready(30)
    assert not engine.ready
    engine.close()


async def test_cells_that_llama_cpp_does_not_find_cost_time_only(nano_f32: Path) -> None:
    rng = random.Random(3)
    requests = [Question(random_prompt(rng, 30), 60) for _ in range(4)]
    with running(nano_f32, **EXACT, speculation="off") as engine:
        expected = [await ask(engine, request) for request in requests]
        decode, calls = engine.components.context.decode, 0

        def sometimes_full(n: int, **how: Any) -> None:
            nonlocal calls
            calls += 1
            if calls % 20 == 0 and len(engine.components.scheduler.running) > 1:
                raise NoMemorySlot("no room")
            decode(n, **how)

        engine.components.context.decode = sometimes_full  # type: ignore[method-assign,assignment]
        assert await ask_at_once(engine, requests) == expected
        assert engine.stats().preemptions > 0


# --- the way out -------------------------------------------------------------------------------------------


async def test_closing_fails_what_is_in_flight(engine: Engine) -> None:
    generation = ask_for(engine, 1900)
    await first(generation)
    engine.close()
    engine.close()
    with pytest.raises(GenerationError, match="closed"):
        await rest(generation)
    with pytest.raises(EngineDead, match="closed"):
        ask_for(engine, 1)


def test_an_engine_that_was_never_started_can_be_closed(nano_f32: Path) -> None:
    engine = Engine(settings(nano_f32))
    assert not engine.ready
    assert not engine.wait_ready(0)
    engine.close()


def test_the_model_describes_itself(engine: Engine) -> None:
    assert engine.metadata["general.architecture"] == "qwen35"
    assert engine.description.startswith("qwen35")
    assert engine.n_params > 1_000_000
    assert engine.size_bytes > 4 * engine.n_params * 0.9


def test_what_waits_for_a_step_is_told_that_none_will_come(engine: Engine) -> None:
    with standing_still(engine):
        waiting = engine.between_steps(lambda: "done")
        closing = threading.Thread(target=engine.close)
        closing.start()
        wait_until(lambda: engine._closing)  # noqa: SLF001 - `close` blocks from here on
    closing.join()
    for asking in (waiting.result, partial(engine.between_steps, lambda: "done")):
        with pytest.raises(EngineDead, match="was closed"):
            asking()
