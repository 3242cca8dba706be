"""Checks, their registry, and the server under test."""

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qwen_serve.bench.load.client import Client, clip, error_text
from qwen_serve.bench.load.protocol import FILLER
from qwen_serve.bench.load.vocabulary import Vocabulary

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
INVOCATIONS = "/invocations"

PROMPT = FILLER * 6
QUESTION = "What is 2+2?"
MESSAGES = [{"role": "user", "content": QUESTION}]

Answer = Mapping[str, Any]


class FailedError(Exception):
    """The server breaks the contract. The message says what was expected and what was returned."""


class SkippedError(Exception):
    """The check does not apply to this server. The message says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """The server under test. ``context``: maximum tokens of a sequence; None if the server does not report
    it."""

    client: Client
    vocabulary: Vocabulary | None
    context: int | None
    thinking_tokens: int
    oversized_bytes: int

    async def ask(self, path: str, **fields: Any) -> Answer:
        """POST a valid request. Raises FailedError unless it returns 200 and an object."""
        reply = await self.client.request("POST", path, body=fields)
        expect(reply.status == 200, f"want 200, got {reply.status}: {error_text(reply)}")
        answer = reply.json()
        expect(isinstance(answer, dict), f"want an object, got {clip(reply.text)}")
        return answer  # type: ignore[no-any-return]

    async def complete(self, prompt: Any = PROMPT, **fields: Any) -> Answer:
        """A greedy raw completion of 16 tokens; ``fields`` override that."""
        return await self.ask(
            COMPLETIONS, **{"prompt": prompt, "max_tokens": 16, "temperature": 0.0, **fields}
        )

    async def text(self, prompt: Any = PROMPT, **fields: Any) -> str:
        """The first choice's text of `complete`."""
        return str((await self.complete(prompt, **fields))["choices"][0]["text"])

    async def chat(self, messages: Any = None, **fields: Any) -> Answer:
        """A greedy chat completion of at most 64 tokens; ``fields`` override that."""
        body = {"messages": messages or MESSAGES, "max_tokens": 64, "temperature": 0.0, **fields}
        return await self.ask(CHAT, **body)

    async def chunks(self, path: str, **fields: Any) -> list[Answer]:
        """The chunks of a streamed request, in order. Raises FailedError unless it ends with [DONE]."""
        events = [data async for _, data in self.client.events(path, {**fields, "stream": True})]
        expect(bool(events) and events[-1] == "[DONE]", "the stream does not end with `data: [DONE]`")
        expect("[DONE]" not in events[:-1], "[DONE] comes before the end of the stream")
        return [json.loads(data) for data in events[:-1]]

    async def needs(self, method: str, path: str) -> None:
        """Raises SkippedError if the server has no such endpoint."""
        reply = await self.client.request(method, path, body={} if method == "POST" else None)
        if reply.status in (404, 405, 501):
            raise SkippedError(f"the server has no {method} {path}")

    def tokenizer(self) -> Vocabulary:
        """The independent tokenizer. Raises SkippedError without one."""
        if self.vocabulary is None:
            raise SkippedError("needs a tokenizer: the server has no /tokenize, and --tokenizer names none")
        return self.vocabulary


@dataclass(frozen=True, slots=True)
class Check:
    """One rule of the contract. ``name``: theme.rule; ``what``: the rule in words."""

    name: str
    what: str
    run: Callable[[Target], Awaitable[None]]


CHECKS: list[Check] = []


def check(what: str) -> Callable[[Callable[[Target], Awaitable[None]]], Callable[[Target], Awaitable[None]]]:
    """Register a function as a check. Its name is MODULE.FUNCTION."""

    def register(function: Callable[[Target], Awaitable[None]]) -> Callable[[Target], Awaitable[None]]:
        theme = function.__module__.rpartition(".")[2]
        CHECKS.append(Check(f"{theme}.{function.__name__}", what, function))
        return function

    return register


def expect(condition: object, message: str) -> None:
    """Raises FailedError with ``message`` if the condition is false."""
    if not condition:
        raise FailedError(message)


def expect_equal(found: object, wanted: object, what: str) -> None:
    """Raises FailedError, which shows both values, if they differ."""
    expect(found == wanted, f"{what}: want {_show(wanted)}, got {_show(found)}")


def _show(value: object) -> str:
    return clip(json.dumps(value, ensure_ascii=False, default=str), 160)
