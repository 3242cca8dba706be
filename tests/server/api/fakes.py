"""A scripted engine over a byte-level vocabulary: what the API does, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from server.engine import (
    EngineSettings,
    EngineStats,
    FinishReason,
    Generation,
    InvalidPrompt,
    PromptTooLong,
    QueueFull,
    SamplingParams,
    Timings,
)

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
    bos_id = None

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        ids: list[int] = []
        while text:
            for number, added in enumerate(ADDED):
                if text.startswith(added) and (special or added not in CONTROL):
                    ids.append(256 + number)
                    text = text[len(added) :]
                    break
            else:
                ids += text[0].encode()
                text = text[1:]
        return ids

    def token_bytes(self, token: int) -> bytes:
        if token < 256:
            return bytes([token])
        text = ADDED[token - 256]
        return b"" if text in CONTROL else text.encode()

    def is_eog(self, token: int) -> bool:
        return token == self.eos_id


Script = Callable[[str], "str | Exception | list[int | Exception]"]
"""From the prompt's text to the reply: a text, an error to raise, or tokens (an error among them ends it)."""


@dataclass
class Submission:
    """What the engine was asked, and what became of it."""

    prompt: list[int]
    text: str
    params: SamplingParams
    limit: int
    cancelled: bool = False
    finished: bool = False
    sent: int = 0


@dataclass
class FakeEngine:
    """Replies by `script`, a token every `delay` seconds."""

    script: Script
    delay: float = 0.0
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
    submissions: list[Submission] = field(default_factory=list)
    vocab: FakeVocab = field(default_factory=FakeVocab)
    settings: EngineSettings = field(default_factory=lambda: EngineSettings(model=Path("fake.gguf")))
    description: str = "qwen35 fake"
    n_params: int = 7
    size_bytes: int = 14
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def text(self, prompt: Sequence[int]) -> str:
        """A prompt with its special tokens spelled out."""
        return b"".join(bytes([i]) if i < 256 else ADDED[i - 256].encode() for i in prompt).decode(
            "utf-8", "replace"
        )

    @property
    def running(self) -> list[Submission]:
        return [entry for entry in self.submissions if not entry.finished]

    def submit(self, prompt: Sequence[int], params: SamplingParams, max_tokens: int | None) -> Generation:
        if not prompt or not all(0 <= token < self.vocab.size for token in prompt):
            raise InvalidPrompt("ids run from 0")
        if len(prompt) >= self.context_size:
            raise PromptTooLong(len(prompt), self.context_size)
        if len(self.running) >= self.capacity:
            raise QueueFull("try again later")
        room = self.context_size - len(prompt)
        limit = room if max_tokens is None else min(max_tokens, room)
        entry = Submission(list(prompt), self.text(prompt), params, limit)
        reply = self.script(entry.text)
        if isinstance(reply, Exception):
            raise reply
        tokens: list[Any] = self.vocab.tokenize(reply, special=True) if isinstance(reply, str) else reply
        self.submissions.append(entry)
        timings = Timings(submitted=perf_counter(), started=perf_counter())
        generation = Generation(len(prompt), timings, lambda: setattr(entry, "cancelled", True))
        task = asyncio.get_running_loop().create_task(self._run(entry, generation, tokens))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return generation

    async def _run(self, entry: Submission, generation: Generation, tokens: list[Any]) -> None:
        done: FinishReason | Exception = "stop"
        for token in tokens:
            await asyncio.sleep(self.delay)
            if entry.cancelled:
                done = "cancelled"
                break
            if isinstance(token, Exception):
                done = token
                break
            generation.timings.first_token = generation.timings.first_token or perf_counter()
            entry.sent += 1
            generation.receive([token], None)
            if entry.sent == entry.limit:
                done = "length"
                break
        generation.timings.finished = perf_counter()
        entry.finished = True
        generation.receive([], done)

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
