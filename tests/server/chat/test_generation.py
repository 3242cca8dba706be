"""From a prompt to text, with scripted engines and the real one."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from qwen_serve.server.chat import StopStrings, TextGeneration
from qwen_serve.server.engine import (
    Engine,
    EngineSettings,
    GenerateRequest,
    GenerationError,
    Prompt,
    SamplingParams,
    ThinkingLimits,
)
from qwen_serve.server.engine.request import Request
from tests.server.api.fakes import FakeVocab
from tests.server.chat.test_detokenizer import Bytes
from tests.waiting import until


class Scripted:
    """A generation that returns these batches of tokens, then ends, fails or hangs."""

    def __init__(self, batches: list[list[int]], end: str | Exception | None) -> None:
        self.request = Request([0] * 7, 99)
        self.finish_reason: Any = None
        self.cancelled = 0
        self._batches = batches
        self._end = end

    def __aiter__(self) -> AsyncIterator[list[int]]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[list[int]]:
        for batch in self._batches:
            await asyncio.sleep(0)
            yield batch
        if isinstance(self._end, Exception):
            raise self._end
        if self._end is None:
            await asyncio.Event().wait()
        self.finish_reason = self._end

    def cancel(self) -> None:
        self.cancelled += 1


PIECES = [b"Yes", b" and", b" no", b"\n\n", b"\xe2\x82", b"\xac", b"", b"STOP"]


def texts(
    batches: list[list[int]], end: str | Exception | None, *stop: str
) -> tuple[TextGeneration, Scripted]:
    scripted = Scripted(batches, end)
    return TextGeneration(scripted, Bytes(PIECES), StopStrings(stop) if stop else None), scripted  # type: ignore[arg-type]


async def test_deltas_are_whole_characters_and_never_empty() -> None:
    generation, _ = texts([[0], [4], [5, 6], [6], [1]], "length")
    assert generation.finish_reason is None
    assert [delta async for delta in generation] == ["Yes", "€", " and"]
    assert generation.finish_reason == "length"
    assert (generation.request.prompt_length, generation.completion_tokens) == (7, 6)


async def test_a_stop_string_ends_and_frees_the_sequence() -> None:
    generation, scripted = texts([[0, 1], [3], [2]], None, "\n\n no", "d\n")
    assert [delta async for delta in generation] == ["Yes an"]
    assert (generation.finish_reason, generation.stop_string) == ("stop", "d\n")
    assert generation.completion_tokens == 2
    assert scripted.cancelled


async def test_thoughts_are_counted_within_the_text() -> None:
    """The engine may be ahead of the text, or have generated tokens that a stop string removed."""
    generation, scripted = texts([[0, 1], [3], [2]], None, "\n\n no")
    assert generation.reasoning_tokens is None
    scripted.request.thinking = ThinkingLimits().begin(FakeVocab())  # type: ignore[arg-type]
    scripted.request.thinking.follow([1, 2, 3, 4])
    assert generation.reasoning_tokens == 0
    assert [delta async for delta in generation] == ["Yes and"]
    assert generation.reasoning_tokens == 2


async def test_what_was_held_back_comes_at_the_end() -> None:
    generation, _ = texts([[0, 3]], "stop", "\n\n\n")
    assert [delta async for delta in generation] == ["Yes", "\n\n"]
    assert (generation.finish_reason, generation.stop_string) == ("stop", None)


async def test_leaving_early_frees_the_sequence() -> None:
    generation, scripted = texts([[0], [1]], None)
    iterator = aiter(generation)
    assert await anext(iterator) == "Yes"
    assert not scripted.cancelled
    await iterator.aclose()  # type: ignore[attr-defined]
    assert scripted.cancelled
    assert generation.finish_reason is None


async def test_a_cancelled_task_frees_the_sequence() -> None:
    generation, scripted = texts([[0]], None)

    async def consume() -> None:
        async for _ in generation:
            pass

    task = asyncio.create_task(consume())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert scripted.cancelled


async def test_an_engine_failure_reaches_the_caller() -> None:
    generation, _ = texts([[0]], GenerationError("the card fell off the bus"))
    with pytest.raises(GenerationError, match="card"):
        [delta async for delta in generation]
    assert generation.finish_reason is None


async def test_cancel_frees_the_sequence() -> None:
    generation, scripted = texts([[0]], None)
    generation.cancel()
    assert scripted.cancelled


def generate(
    engine: Engine,
    prompt: Prompt,
    params: SamplingParams,
    limit: int | None,
    *stops: str,
    stream: bool = True,
) -> TextGeneration:
    generation = engine.submit(GenerateRequest(prompt, params, limit, stream=stream))
    return TextGeneration(generation, engine.vocab, StopStrings(stops) if stops else None)


@pytest.fixture(scope="module")
def engine(nano_f16: Path) -> Iterator[Engine]:
    engine = Engine(EngineSettings(model=nano_f16, ctx_size=2048, parallel=2, threads=1))
    engine.start()
    assert engine.wait_ready(60)
    yield engine
    engine.close()


async def test_the_real_engine(engine: Engine) -> None:
    ids = engine.vocab.tokenize("The quick brown fox jumps over the lazy dog. ", special=True)
    prompt = engine.prompt(ids)
    generation = generate(engine, prompt, SamplingParams(temperature=0.0, ignore_eos=True), 24)
    text = "".join([delta async for delta in generation])
    assert (generation.finish_reason, generation.request.prompt_length) == ("length", len(ids))
    assert generation.completion_tokens == 24
    assert text

    stop = text[len(text) // 2 :][:3]
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    stopped = generate(engine, prompt, params, 24, stop)
    assert "".join([delta async for delta in stopped]) == text.partition(stop)[0]
    assert (stopped.finish_reason, stopped.stop_string) == ("stop", stop)
    assert stopped.completion_tokens < 24
    await until(lambda: not engine.stats().running)

    at_once = generate(engine, prompt, params, 24, stream=False)
    assert [delta async for delta in at_once] == [text]
    assert at_once.completion_tokens == 24


async def test_leaving_the_loop_frees_the_real_engine(engine: Engine) -> None:
    prompt = engine.prompt(engine.vocab.tokenize("One, two, ", special=True))
    generation = generate(engine, prompt, SamplingParams(temperature=0.0, ignore_eos=True), None)
    async for _ in generation:
        break
    await until(lambda: not engine.stats().running)
