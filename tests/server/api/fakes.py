"""A scripted engine with a byte-level vocabulary, for tests of the API without a model."""

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper

from qwen_serve.server.engine import (
    CacheMiss,
    EngineSettings,
    EngineStats,
    FinishReason,
    GenerateRequest,
    GenerationError,
    Grammar,
    InvalidGrammar,
    InvalidPrompt,
    Logprobs,
    PromptTooLong,
    QueueFull,
    SamplingParams,
    TokenLogprobs,
)
from qwen_serve.server.engine.request import Request
from qwen_serve.server.engine.sampling.grammar import GrammarCompiler
from tests.waiting import until

ADDED = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
CONTROL = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}


class FakeVocab:
    """Ids 0 to 255 are bytes; Qwen's added tokens follow."""

    added_tokens = ADDED
    size = 256 + len(ADDED)
    eos_id = 256 + ADDED.index("<|im_end|>")
    n_real = size
    bos_id = None

    def tokenize(
        self, text: str, *, special: bool, check: Callable[[int], None] = lambda _: None
    ) -> list[int]:
        ids: list[int] = []
        for part in re.split(f"({'|'.join(map(re.escape, ADDED))})", text):
            is_token = part in ADDED and (special or part not in CONTROL)
            ids += [256 + ADDED.index(part)] if is_token else part.encode()
        check(len(ids))
        return ids

    def token_bytes(self, token: int) -> bytes:
        if token < 256:
            return bytes([token])
        text = ADDED[token - 256]
        return b"" if text in CONTROL else text.encode()

    @cached_property
    def kept(self) -> dict[object, Any]:
        return {}

    def spelling(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else ADDED[token - 256].encode()


Script = Callable[[str], "str | Exception | list[int | Exception]"]
"""From the prompt's text to the reply: a text, an error to raise, or tokens (an error among them ends it)."""


@dataclass(frozen=True)
class FakePrompt:
    """Checked token ids, and the thread that checked them."""

    ids: tuple[int, ...]
    thread: int


@dataclass
class Submission:
    """A request to the engine, and its outcome."""

    checked: FakePrompt
    text: str
    limit: int
    request: GenerateRequest
    cancelled: bool = False
    finished: bool = False
    sent: int = 0
    deliveries: int = 0
    """How often the listener was given tokens."""

    @property
    def prompt(self) -> list[int]:
        return list(self.checked.ids)

    @property
    def params(self) -> SamplingParams:
        return self.request.params


def told(token: int, n_top: int | None) -> TokenLogprobs:
    """Made-up log-probabilities: -0.1 for the token itself, where it is even, and for the one below it."""
    ids, logprobs = np.array([token - token % 2, token | 1], np.int32), np.array([-0.1, -2.5])
    own = -2.5 if token % 2 else -0.1
    return TokenLogprobs(token, own, 1 + token % 2, ids[:n_top], logprobs[:n_top])


class FakeGeneration:
    """The public part of `server.engine.Generation`."""

    def __init__(self, entry: Submission) -> None:
        asked, logprobs = entry.request, Logprobs.wanted(entry.params)
        self.request = Request(
            entry.prompt,
            entry.limit,
            logprobs=logprobs,
            scheduling=asked.scheduling,
            reports_progress=asked.reports_progress,
            thinking=asked.thinking.begin(cast("Any", FakeVocab())) if asked.thinking else None,
        )
        if logprobs is not None and logprobs.of_prompt:
            logprobs.prompt += [told(token, entry.params.prompt_logprobs) for token in entry.prompt[1:]]
        self.request.missed = CacheMiss("new", 0)
        self.request.timings.started = perf_counter()
        self.finish_reason: FinishReason | None = None
        self._entry = entry
        self._arrived: list[int] = []
        self._done: FinishReason | Exception | None = None
        self._news = asyncio.Event()

    def cancel(self) -> None:
        self._entry.cancelled = True

    def receive(self, tokens: list[int], done: FinishReason | Exception | None) -> None:
        self._arrived += tokens
        self._done = done
        self._news.set()

    async def __aiter__(self) -> AsyncIterator[list[int]]:
        while True:
            await self._news.wait()
            self._news.clear()
            while self._arrived:  # also what came while the listener was at work
                tokens, self._arrived = self._arrived, []
                self._entry.deliveries += 1
                yield tokens
            if isinstance(self._done, Exception):
                raise GenerationError(str(self._done)) from self._done
            if self._done is not None:
                self.finish_reason = self._done
                return


class FakeTokenizer:
    """The vocabulary in llguidance's format."""

    def __init__(self) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"\xff" + text.encode() for text in ADDED]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.eos_token_id, self.bos_token_id = FakeVocab.eos_id, None

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


@cache
def compiler() -> GrammarCompiler:
    """A compiler for all engines. Its thread ends with the tests."""
    return GrammarCompiler(lambda: LLTokenizer(TokenizerWrapper(FakeTokenizer())), FakeVocab.eos_id, ADDED)


class FakeGrammars:
    """Compiles grammars to find their errors, then refuses all, since a script follows no grammar."""

    def compile(self, text: str) -> Future[Grammar]:
        refused: Future[Grammar] = Future()

        def judge(compiled: Future[Grammar]) -> None:
            if not refused.cancelled() and refused.set_running_or_notify_cancel():
                error = compiled.exception() or InvalidGrammar("a scripted engine follows none")
                refused.set_exception(error)

        compiled = compiler().compile(text)
        compiled.add_done_callback(judge)
        refused.add_done_callback(lambda _: compiled.cancel())  # if nobody waits any more
        return refused

    def stop(self) -> None:
        """Nothing has to be stopped."""


class FakeDries:
    """Stand-in for DRY's state, since nothing is sampled."""

    def __init__(self) -> None:
        self.asked: list[tuple[SamplingParams, int]] = []
        """What was asked for, and the thread that asked."""

    def of(self, params: SamplingParams) -> None:
        self.asked.append((params, threading.get_ident()))


@dataclass
class FakeEngine:
    """Answers with the tokens of `script`, one every `delay` seconds."""

    script: Script
    delay: float = 0.0
    held: bool = False
    """Whether no token comes for now."""
    context_size: int = 4096
    capacity: int = 64
    metadata: dict[str, str] = field(
        default_factory=lambda: {
            "general.name": "Fake",
            "general.architecture": "qwen35",
            "qwen35.context_length": "262144",
        }
    )
    ready: bool = True
    closed: bool = False
    checks: list[FakePrompt] = field(default_factory=list)
    loop_threads: set[int] = field(default_factory=set)
    """Those that submitted."""
    submissions: list[Submission] = field(default_factory=list)
    vocab: FakeVocab = field(default_factory=FakeVocab)
    settings: EngineSettings = field(default_factory=lambda: EngineSettings(model=Path("fake.gguf")))
    description: str = "qwen35 fake"
    n_params: int = 7
    size_bytes: int = 14
    grammars: FakeGrammars = field(default_factory=FakeGrammars)
    dries: FakeDries = field(default_factory=FakeDries)
    encoder: None = None
    components: Any = field(
        default_factory=lambda: SimpleNamespace(
            scheduler=SimpleNamespace(running=[]), device_runs_alone=False
        )
    )
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def text(self, prompt: Sequence[int]) -> str:
        """A prompt's text, with special tokens."""
        return b"".join(bytes([i]) if i < 256 else ADDED[i - 256].encode() for i in prompt).decode(
            "utf-8", "replace"
        )

    @property
    def running(self) -> list[Submission]:
        return [entry for entry in self.submissions if not entry.finished]

    def prompt(self, ids: Sequence[int], pictures: Sequence[object] = ()) -> FakePrompt:
        assert not pictures
        checked = FakePrompt(tuple(ids), threading.get_ident())
        self.checks.append(checked)
        if not ids or not all(0 <= token < self.vocab.size for token in ids):
            raise InvalidPrompt("ids run from 0")
        if len(ids) >= self.context_size:
            raise PromptTooLong(len(ids), self.context_size, exactly=True)
        return checked

    def submit(self, request: GenerateRequest) -> FakeGeneration:
        prompt = cast("FakePrompt", request.prompt)
        self.loop_threads.add(threading.get_ident())
        if len(self.running) >= self.capacity:
            raise QueueFull("try again later")
        room = self.context_size - len(prompt.ids)
        limit = room if request.max_tokens is None else min(request.max_tokens, room)
        entry = Submission(prompt, self.text(prompt.ids), limit, request)
        reply = self.script(entry.text)
        if isinstance(reply, Exception):
            raise reply
        tokens: list[Any] = self.vocab.tokenize(reply, special=True) if isinstance(reply, str) else reply
        self.submissions.append(entry)
        generation = FakeGeneration(entry)
        task = asyncio.get_running_loop().create_task(self._run(entry, generation, tokens))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return generation

    async def _run(self, entry: Submission, generation: FakeGeneration, tokens: list[Any]) -> None:
        done: FinishReason | Exception = "stop"
        logprobs = generation.request.logprobs
        undelivered: list[int] = []
        if entry.limit == 0:
            tokens, done = [], "length"
        for token in tokens:
            await asyncio.sleep(self.delay)  # a token takes as long
            if self.held:
                await until(lambda: not self.held or entry.cancelled)
            if entry.cancelled:
                done = "cancelled"
                break
            if isinstance(token, Exception):
                done = token
                break
            generation.request.timings.first_token = generation.request.timings.first_token or perf_counter()
            entry.sent += 1
            generation.request.tokens.append(token)
            if generation.request.thinking is not None:
                generation.request.thinking.follow([token])
            if logprobs is not None and logprobs.of_answer:
                logprobs.tokens.append(told(token, entry.params.logprobs))
            if entry.request.stream:
                generation.receive([token], None)
            else:
                undelivered.append(token)
            if entry.sent == entry.limit:
                done = "length"
                break
        if done == "stop" and logprobs is not None and logprobs.of_answer:
            logprobs.tokens.append(told(self.vocab.eos_id, entry.params.logprobs))
        generation.request.timings.finished = perf_counter()
        entry.finished = True
        generation.receive(undelivered, done)

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.running),
            waiting=0,
            steps=0,
            prompt_tokens=0,
            generated_tokens=0,
            preemptions=0,
            kv_cells_used=3,
            kv_cells=self.context_size,
        )

    def close(self) -> None:
        self.closed = True
