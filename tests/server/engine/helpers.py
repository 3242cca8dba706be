"""Helpers of the engine's tests: small engines, requests served together, and the same tokens decoded
alone."""

import asyncio
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_serve.llamacpp import Context, ContextOptions, Model
from qwen_serve.server.engine import (
    Adapters,
    Engine,
    EngineSettings,
    FinishReason,
    GenerateRequest,
    Generation,
    SamplingParams,
    SchedulingParams,
    Vocab,
)
from qwen_serve.server.engine.request import ANYBODY
from tests.waiting import until, wait_until

EXACT: dict[str, Any] = {"flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32"}
"""With F32 weights on the CPU: logits move by 1e-6 with the shape of a batch, which no greedy choice sees."""


def settings(model: Path, **changes: Any) -> EngineSettings:
    """A small engine on one thread: tests share their cores, and threads that spin for each other crawl."""
    defaults: dict[str, Any] = {"n_gpu_layers": 0, "threads": 1, "ctx_size": 2048, "parallel": 4}
    return EngineSettings(model=model, **{**defaults, **changes})


@contextmanager
def running(model: Path, **changes: Any) -> Iterator[Engine]:
    """A warm engine, closed afterwards."""
    engine = Engine(settings(model, **changes))
    try:
        engine.start()
        assert engine.wait_ready(60)
        yield engine
    finally:
        engine.close()


@dataclass
class Question:
    """Greedy unless `params` says otherwise, and regardless of the end token, so that the length is known."""

    prompt: list[int]
    max_tokens: int = 32
    delay: float = 0.0
    """Seconds before it is submitted."""
    cancel_after: int | None = None
    """Tokens after which its listener leaves."""
    params: SamplingParams = field(default_factory=lambda: SamplingParams(ignore_eos=True))
    stream: bool = True
    scheduling: SchedulingParams = ANYBODY
    grammar: str | None = None
    """What the answer is kept to, in llguidance's Lark."""
    adapters: Adapters = ()


@dataclass
class Answer:
    """All tokens of an answer, and its end."""

    tokens: list[int]
    finish_reason: FinishReason | None


async def ask(engine: Engine, request: Question) -> Answer:
    """Submit a request and collect its answer."""
    await asyncio.sleep(request.delay)  # requests come when they come
    return await _collect(submit(engine, request), request)


def submit(engine: Engine, request: Question) -> Generation:
    """Submit a request without its delay."""
    grammar = None if request.grammar is None else engine.grammars.compile(request.grammar).result()
    return engine.submit(
        GenerateRequest(
            engine.prompt(request.prompt),
            request.params,
            request.max_tokens,
            stream=request.stream,
            scheduling=request.scheduling,
            constraint=None if grammar is None else grammar.begin(),
            adapters=request.adapters,
        )
    )


async def _collect(generation: Generation, request: Question) -> Answer:
    tokens: list[int] = []
    async for new in generation:
        assert new, "an empty list was delivered"
        tokens += new
        if request.cancel_after is not None and len(tokens) >= request.cancel_after:
            generation.cancel()
    return Answer(tokens, generation.finish_reason)


async def told(engine: Engine, request: Question) -> tuple[list[int], str]:
    """An answer's tokens and log-probabilities, to the last bit; as far as its listener stays."""
    await asyncio.sleep(request.delay)  # requests come when they come
    generation = submit(engine, request)
    tokens: list[int] = []
    async for new in generation:
        tokens += new
        if request.cancel_after is not None and len(tokens) >= request.cancel_after:
            generation.cancel()
    assert generation.request.logprobs is not None
    return tokens, repr(generation.request.logprobs.tokens)


async def ask_all(engine: Engine, requests: Sequence[Question]) -> list[Answer]:
    """Submit requests at the moments they name, and wait for all."""
    return list(await asyncio.gather(*(ask(engine, request) for request in requests)))


async def ask_at_once(engine: Engine, requests: Sequence[Question]) -> list[Answer]:
    """Submit all requests, whatever their delays, before the engine looks at the first; wait for all."""
    with standing_still(engine):
        generations = [submit(engine, request) for request in requests]
    return list(await asyncio.gather(*map(_collect, generations, requests)))


def choosing(tokens: Iterator[int]) -> Callable[..., int]:
    """In place of `Sampler.choose`: these tokens, whatever the rows are."""
    return lambda *_: next(tokens)


async def idle(engine: Engine) -> None:
    """Wait until no request runs or waits, and the engine's thread has finished with them."""
    await until(lambda: engine.stats().running == engine.stats().waiting == 0)
    through = threading.Event()
    engine.between_steps(through.set)  # a step may be under way

    def is_through() -> bool:
        assert engine.ready, "the engine has failed"
        return through.is_set() and not engine.components.states.deferred

    await until(is_through)


@contextmanager
def standing_still(engine: Engine) -> Iterator[None]:
    """An idle engine admits no request until the end of the block, and then all at once."""
    go_on = threading.Event()

    def wait() -> None:
        assert go_on.wait(60)

    engine.between_steps(wait)
    try:
        yield
    finally:
        go_on.set()


@contextmanager
def step_by_step(engine: Engine) -> Iterator[Callable[[int], None]]:
    """The engine takes only granted steps: `grant(n)` returns after `n` of them. At the end of the block it
    runs freely again.
    """
    leave, step = threading.Semaphore(0), engine._step  # noqa: SLF001 - no setting paces an engine

    def wait_for_leave(*, last: bool = False) -> None:
        leave.acquire()
        step(last=last)

    def grant(n: int) -> None:
        wanted = engine.stats().steps + n
        leave.release(n)
        wait_until(lambda: engine.stats().steps >= wanted, 60)

    engine._step = wait_for_leave  # type: ignore[method-assign]  # noqa: SLF001 - no setting paces an engine
    try:
        yield grant
    finally:
        engine._step = step  # type: ignore[method-assign]  # noqa: SLF001 - no setting paces an engine
        leave.release()


def random_prompt(rng: random.Random, length: int) -> list[int]:
    """Random ids of ordinary tokens, partly repeated, so that predictions are not uniform."""
    words = [rng.randrange(256, 2000) for _ in range(max(1, length // 3))]
    return [rng.choice(words) for _ in range(length)]


class Alone:
    """Sequences decoded with the bare context, one after the other: what the engine must reproduce."""

    def __init__(
        self, path: Path, *, flash_attn: str, cache_type_k: str, cache_type_v: str, n_gpu_layers: int = 0
    ) -> None:
        self.model = Model(path, n_gpu_layers=n_gpu_layers)
        self.n_seq = 8
        options = ContextOptions(
            n_ctx=8192,
            n_seq=self.n_seq,
            n_batch=512,
            n_ubatch=512,
            n_outputs=512,
            threads=1,
            threads_batch=1,
            flash_attn=flash_attn,
            type_k=cache_type_k,
            type_v=cache_type_v,
        )
        self.context = Context(self.model, options)
        vocab = Vocab(self.model)
        self.eog, self.n_real = sorted(vocab.eog_ids), vocab.n_real

    def close(self) -> None:
        """Free both."""
        self.context.close()
        self.model.close()

    def greedy(self, prompt: list[int], n: int) -> list[int]:
        """The `n` best tokens after `prompt`, read in one piece and then one by one."""
        tokens = list(prompt)
        start = 0
        while len(tokens) < len(prompt) + n:
            tokens.append(int(self.rows(tokens, start, len(tokens))[-1].argmax()))
            start = len(tokens) - 1
        self.context.clear()
        return tokens[len(prompt) :]

    def logits(self, tokens: list[int], chunk: int) -> npt.NDArray[np.float32]:
        """Logits after each of `tokens`, decoded `chunk` at a time: shape [len(tokens), n_real]."""
        rows = [
            self.rows(tokens, start, min(start + chunk, len(tokens)))
            for start in range(0, len(tokens), chunk)
        ]
        self.context.clear()
        return np.concatenate(rows)

    def logits_together(self, sequences: Sequence[list[int]]) -> list[npt.NDArray[np.float32]]:
        """The same for up to `n_seq` sequences side by side, a token of each at a time."""
        rows: list[list[npt.NDArray[np.float32]]] = [[] for _ in sequences]
        for position in range(max(map(len, sequences))):
            present = [i for i, tokens in enumerate(sequences) if position < len(tokens)]
            n = len(present)
            self.context.tokens[:n] = [sequences[i][position] for i in present]
            self.context.positions[:n] = position
            self.context.sequences[:n] = present
            self.context.outputs[:n] = 1
            self.context.decode(n)
            for i, row in zip(present, self._masked(n), strict=True):
                rows[i].append(row)
        self.context.clear()
        return [np.stack(collected) for collected in rows]

    def rows(self, tokens: list[int], start: int, end: int) -> npt.NDArray[np.float32]:
        n = end - start
        self.context.tokens[:n] = tokens[start:end]
        self.context.positions[:n] = range(start, end)
        self.context.sequences[:n] = 0
        self.context.outputs[:n] = 1
        self.context.decode(n)
        return self._masked(n)

    def _masked(self, n: int) -> npt.NDArray[np.float32]:
        rows = self.context.logits(n)[:, : self.n_real].copy()
        rows[:, self.eog] = -np.inf
        return rows


def answers_alone(path: Path, prompts: list[list[int]], n: int) -> list[list[int]]:
    """The `n` best tokens after each prompt, in F32, decoded one request after the other."""
    reference = Alone(path, **EXACT)
    answers = [reference.greedy(prompt, n) for prompt in prompts]
    reference.close()
    return answers
