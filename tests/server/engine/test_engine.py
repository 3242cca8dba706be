"""The engine's interface: answers, limits, cancellation, failures, and closing."""

import asyncio
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qwen_serve.llamacpp.errors import LlamaError
from qwen_serve.server.engine import (
    Engine,
    GenerateRequest,
    Generation,
    GenerationError,
    InvalidPrompt,
    Prompt,
    PromptTooLong,
    QueueFull,
    SamplingParams,
    SchedulingParams,
)
from qwen_serve.server.engine.outputs import OutputQueue
from qwen_serve.server.engine.sampling import Sampler
from tests.server.engine.helpers import (
    EXACT,
    Question,
    ask,
    ask_all,
    choosing,
    idle,
    running,
    standing_still,
    step_by_step,
    submit,
)
from tests.server.engine.inside import at_rest
from tests.waiting import until

ENDLESS = SamplingParams(ignore_eos=True)
PROMPT = list(range(300, 320))


@pytest.fixture
def engine(nano_f32: Path) -> Iterator[Engine]:
    with running(nano_f32, **EXACT) as engine:
        yield engine


def ask_for(
    engine: Engine,
    max_tokens: int | None,
    *,
    prompt: list[int] = PROMPT,
    params: SamplingParams = ENDLESS,
    stream: bool = True,
) -> Generation:
    """Submit a request."""
    return engine.submit(GenerateRequest(engine.prompt(prompt), params, max_tokens, stream=stream))


async def first(generation: Generation) -> list[int]:
    """Wait for the first tokens of an answer."""
    return await generation.__anext__()


async def rest(generation: Generation) -> list[int]:
    return [token async for tokens in generation for token in tokens]


async def over(generation: Generation) -> None:
    """All of it has arrived, though nobody has listened."""
    await until(lambda: generation._ended)  # noqa: SLF001 - a look, where listening would take it


async def test_an_answer_has_as_many_tokens_as_asked_for(engine: Engine) -> None:
    generation = ask_for(engine, 20)
    assert generation.finish_reason is None
    assert len(await rest(generation)) == 20
    assert generation.finish_reason == "length"
    assert (generation.request.prompt_length, generation.request.cached_tokens) == (20, 0)


@pytest.mark.parametrize("asked", [None, 10_000])
async def test_an_answer_may_take_all_the_room_there_is(nano_f32: Path, asked: int | None) -> None:
    with running(nano_f32, ctx_size=256) as engine:
        assert engine.context_size == 256
        generation = ask_for(engine, asked)
        assert len(await rest(generation)) == 256 - len(PROMPT)
        assert generation.finish_reason == "length"


async def test_the_end_token_ends_the_answer_and_is_not_part_of_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = iter([400, 401, min(engine.vocab.eog_ids)])
    monkeypatch.setattr(Sampler, "choose", choosing(script))
    generation = ask_for(engine, 100, params=SamplingParams(temperature=1.0))
    assert await rest(generation) == [400, 401]
    assert generation.finish_reason == "stop"


async def test_timings_add_up(engine: Engine) -> None:
    generation = ask_for(engine, 20)
    await rest(generation)
    t = generation.request.timings
    assert 0 < t.submitted <= t.started < t.first_token < t.finished
    total = t.queue_ms + t.prefill_ms + t.decode_ms
    assert math.isclose(total, (t.finished - t.submitted) * 1000, rel_tol=1e-6)


async def test_stats_count_what_happened(engine: Engine) -> None:
    await ask_all(engine, [Question(PROMPT, 10), Question(PROMPT[:5], 7)])
    await ask(engine, Question(PROMPT, 2000, cancel_after=1))
    stats = engine.stats()
    assert stats.finished == {"length": 2, "cancelled": 1}
    assert stats.prompt_tokens == 20 + 5 + 1  # the second time, all but the last token is in the prefix cache
    assert stats.generated_tokens >= 18
    assert (stats.running, stats.waiting, stats.kv_cells) == (0, 0, 2048)
    assert stats.kv_cells_used == stats.prefix.resident_cells
    assert stats.steps > 10


async def test_a_step_wakes_the_loop_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    deliver, calls = OutputQueue._deliver, 0  # noqa: SLF001 - each wakes the loop

    def counted(self: OutputQueue) -> None:
        nonlocal calls
        calls += 1
        deliver(self)

    monkeypatch.setattr(OutputQueue, "_deliver", counted)
    await ask_all(engine, [Question(PROMPT, 40) for _ in range(4)])
    assert 0 < calls <= engine.stats().steps


async def test_tokens_may_be_told_while_the_device_computes(nano_f32: Path) -> None:
    """As on a GPU: same answers, whoever comes and goes, and nobody's text stays."""
    requests = [Question([7 + i, *PROMPT] * (1 + i % 3), 10 + 9 * i, delay=0.02 * i) for i in range(6)]
    with running(nano_f32, **EXACT, speculation="off") as engine:
        expected = await ask_all(engine, requests)
    drafts = {"speculation": "ngram", "draft_always": True}
    for mix in ({"speculation": "off", "sampling": "device"}, drafts):
        with running(nano_f32, **EXACT, **mix) as engine:
            engine.components.device_runs_alone = True
            assert await ask_all(engine, requests) == expected
            await idle(engine)
            assert at_rest(engine)


async def test_a_slow_listener_gets_everything_at_once(engine: Engine) -> None:
    generation = ask_for(engine, 30)
    await over(generation)
    assert len(await first(generation)) == 30


async def test_an_answer_that_is_not_streamed_is_delivered_once(
    nano_f32: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it passes through the queue before its end."""
    received: list[tuple[Generation, int, bool]] = []
    put: list[Generation] = []
    receive, original = Generation.receive, OutputQueue.put

    def counted_receive(self: Generation, tokens: list[int], *, ended: bool = False) -> None:
        received.append((self, len(tokens), ended))
        receive(self, tokens, ended=ended)

    def counted_put(self: OutputQueue, generation: Generation, *what: Any, **more: Any) -> None:
        put.append(generation)
        original(self, generation, *what, **more)

    monkeypatch.setattr(Generation, "receive", counted_receive)
    monkeypatch.setattr(OutputQueue, "put", counted_put)
    with running(nano_f32, **EXACT, ctx_size=512, parallel=3, speculation="ngram") as engine:
        with standing_still(engine):
            whole = [ask_for(engine, 150, stream=False) for _ in range(2)]
            streamed = ask_for(engine, 150)
        answers = [await rest(generation) for generation in (*whole, streamed)]
        assert answers[0] == answers[1] == answers[2]
        assert len(answers[0]) == 150
        assert [generation.finish_reason for generation in whole] == ["length"] * 2
        assert whole[1].request.cached_tokens == streamed.request.cached_tokens
    for generation in whole:
        assert [how for one, *how in received if one is generation] == [[150, True]]
        assert put.count(generation) == 1
    assert put.count(streamed) > 10


async def test_what_is_not_streamed_arrives_though_it_is_cancelled_or_fails(
    nano_f32: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(nano_f32, **EXACT, speculation="off") as engine:  # a token each step
        expected = await ask(engine, Question(PROMPT, 30))
        with step_by_step(engine) as grant:
            left = ask_for(engine, 30, stream=False)
            grant(9)
            left.cancel()
        tokens = await rest(left)
        assert len(tokens) >= 8
        assert tokens == expected.tokens[: len(tokens)]
        assert left.finish_reason == "cancelled"
        waiting = ask_for(engine, 30, stream=False)

        def fail(_n: int, **_: object) -> None:
            raise LlamaError("llama_decode returned -3")

        monkeypatch.setattr(engine.components.context, "decode", fail)
        with pytest.raises(GenerationError, match="returned -3"):
            await rest(waiting)


# --- what is refused ---------------------------------------------------------------------------------------


def test_bad_prompts_are_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidPrompt, match="empty"):
        engine.prompt([])
    with pytest.raises(InvalidPrompt, match="token 1 of the prompt is -1"):
        engine.prompt([5, -1])
    with pytest.raises(InvalidPrompt, match=f"token 0 of the prompt is {engine.vocab.size}"):
        engine.prompt([engine.vocab.size])
    for large in (2**63, 2**64, 99999999999999999999):
        with pytest.raises(InvalidPrompt, match=f"token 1 of the prompt is {large}; ids run from 0 to"):
            engine.prompt([0, large, -1])
    with pytest.raises(InvalidPrompt, match="integers"):
        engine.prompt([2**64, 0.5])  # type: ignore[list-item]
    with pytest.raises(InvalidPrompt, match="integers"):
        engine.prompt([0.5])  # type: ignore[list-item]
    with pytest.raises(InvalidPrompt, match="integers"):
        engine.prompt([[1], [2]])  # type: ignore[list-item]
    monkeypatch.setattr("qwen_serve.server.engine.prompts.PIECE", 4)
    with pytest.raises(InvalidPrompt, match="token 9 of the prompt is -3"):
        engine.prompt([*range(300, 309), -3])
    assert engine.prompt(PROMPT).ids == PROMPT


async def test_an_answer_is_not_shorter_than_nothing(engine: Engine) -> None:
    with pytest.raises(ValueError, match="max_tokens is -1"):
        ask_for(engine, -1)
    assert engine.stats().waiting == 0


async def test_a_prompt_must_leave_room_for_one_token(engine: Engine) -> None:
    with pytest.raises(PromptTooLong, match="2048 tokens"):
        engine.prompt([7] * 2048)
    assert (await ask(engine, Question([7] * 2047, 10))).finish_reason == "length"


class Watched(list[int]):
    """Ids that remember which threads looked at them."""

    def __init__(self, ids: list[int]) -> None:
        super().__init__(ids)
        self.threads: set[str] = set()

    def _seen(self) -> None:
        self.threads.add(threading.current_thread().name)

    def __iter__(self) -> Iterator[int]:
        self._seen()
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        self._seen()
        return super().__getitem__(index)

    def copy(self) -> list[int]:
        self._seen()
        return super().copy()


async def test_a_prompt_is_checked_once_and_never_on_the_loop(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever submits many choices of one prompt hands it over; the engine's thread copies it."""
    given = Watched(PROMPT)
    prompt = await asyncio.to_thread(engine.prompt, given)
    assert given.threads and threading.current_thread().name not in given.threads
    checks = [0]
    monkeypatch.setattr(engine, "prompt", lambda ids: checks.append(1))
    watched = Watched(prompt.ids)
    shared = Prompt(watched)
    generations = [
        engine.submit(GenerateRequest(shared, replace(ENDLESS, presence_penalty=0.5), 10)) for _ in range(4)
    ]
    answers = [await rest(generation) for generation in generations]
    assert [len(answer) for answer in answers] == [10] * 4
    assert watched.threads == {"engine"}
    assert checks == [0]
    assert shared.ids == PROMPT, "it was copied, not continued"


async def test_the_queue_is_bounded(nano_f32: Path) -> None:
    with running(nano_f32, parallel=2, max_queue=3) as engine:
        with standing_still(engine):
            generations = [ask_for(engine, 50) for _ in range(5)]
            with pytest.raises(QueueFull):
                ask_for(engine, 50)
        assert [len(await rest(generation)) for generation in generations] == [50] * 5
        assert len(await rest(ask_for(engine, 5))) == 5


async def test_who_floods_is_refused_and_another_tenant_is_not(nano_f32: Path) -> None:
    other = Question(PROMPT, 5, scheduling=SchedulingParams("other"))
    with running(nano_f32, parallel=2, max_queue=3) as engine:
        with standing_still(engine):
            flood = [ask_for(engine, 50) for _ in range(5)]
            neighbours = [submit(engine, other) for _ in range(2)]
            for refused in (lambda: ask_for(engine, 50), lambda: submit(engine, other)):
                with pytest.raises(QueueFull, match="of them of this API key or address"):
                    refused()
        assert [len(await rest(one)) for one in neighbours] == [5] * 2
        assert [len(await rest(one)) for one in flood] == [50] * 5
        await idle(engine)
        assert at_rest(engine)


# --- cancellation ------------------------------------------------------------------------------------------


async def test_cancelling_frees_the_place_within_one_step(engine: Engine) -> None:
    with step_by_step(engine) as grant:
        generation = ask_for(engine, 1000)
        grant(5)
        generation.cancel()
        steps = engine.stats().steps
    await idle(engine)
    assert engine.stats().steps <= steps + 1
    assert engine.stats().kv_cells_used == engine.stats().prefix.resident_cells
    await rest(generation)
    assert generation.finish_reason == "cancelled"
    generation.cancel()
    assert engine.stats().finished == {"cancelled": 1}


async def test_cancelling_one_that_waits_or_prefills(nano_f32: Path) -> None:
    with running(nano_f32, parallel=1, batch_size=16) as engine:
        with step_by_step(engine) as grant:
            prefilling = ask_for(engine, 10, prompt=[7] * 1500)
            waiting = ask_for(engine, 10)
            grant(5)
            waiting.cancel()
            grant(5)
            prefilling.cancel()
        assert await rest(waiting) == []
        assert await rest(prefilling) == []
        assert (prefilling.finish_reason, waiting.finish_reason) == ("cancelled", "cancelled")
        assert len(await rest(ask_for(engine, 10))) == 10


def test_listeners_on_a_closed_loop_are_cancelled(engine: Engine) -> None:
    async def leave() -> None:
        await first(ask_for(engine, 1900))

    asyncio.run(leave())

    async def come_back() -> list[int]:
        await idle(engine)
        return await rest(ask_for(engine, 5))

    assert len(asyncio.run(come_back())) == 5
    assert engine.stats().finished == {"cancelled": 1, "length": 1}
