"""A reply, as it streams, in its parts: reasoning, answer, tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

from . import tool_calls
from .tool_calls import Broken, Call, ToolSchemas, parse_call

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

    from server.engine import FinishReason

    from .generation import TextGeneration

_THINK = "<think>"
_END_THINK = "</think>"


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class ToolCall:
    """A complete call; `arguments` is a JSON object in a string, as OpenAI has it."""

    index: int
    id: str
    name: str
    arguments: str


Part = Reasoning | Content | ToolCall


class Reply:
    """A generation in parts: `async for part in reply`, once. Raises what the generation raises.

    With `one_call` it ends behind its first tool call.
    """

    def __init__(self, generation: TextGeneration, parser: ReplyParser, *, one_call: bool = False) -> None:
        self.generation = generation
        self._parser = parser
        self._one_call = one_call

    async def __aiter__(self) -> AsyncIterator[Part]:
        async for text in self.generation:
            for part in self._parser.feed(text):
                yield part
                if self._one_call and isinstance(part, ToolCall):
                    self.generation.cancel()
                    return
        for part in self._parser.flush():
            yield part

    @property
    def finish_reason(self) -> FinishReason | Literal["tool_calls"] | None:
        """As the generation's, but a reply that ended by itself and calls tools says so."""
        reason = self.generation.finish_reason
        if self._parser.tool_calls and (self._one_call or reason == "stop"):
            return "tool_calls"
        return reason


class ReplyParser:
    """Takes text in pieces of any size; the parts, joined, do not depend on where it was cut.

    With `thinking` the prompt opened a think block: the reply begins inside it, up to `</think>` or, when
    there are tools, a `<tool_call>`. White space around the reasoning, and before the answer, belongs to the
    tags. A reply that ends before that is all reasoning. `inline_reasoning` leaves the think block in the
    content as the model wrote it, its opening tag restored.

    `tools` are OpenAI's tool objects; without any, tool calls are not looked for. White space around a call
    is dropped; what turns out to be no call is content to the letter.
    """

    def __init__(
        self,
        *,
        thinking: bool,
        inline_reasoning: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self._state = self._open if thinking else self._answer
        self._inline = inline_reasoning
        self._schemas = ToolSchemas(tools) if tools else None
        self._pending = ""
        self._skip_space = False
        self._searched = 0  # up to here no `</tool_call>` was found in the pending call
        self.tool_calls = 0
        """How many calls were found so far."""

    def feed(self, text: str) -> list[Part]:
        """Take more of the reply; return the parts that are certain now."""
        if self._schemas is None and self._state == self._answer and not self._skip_space:
            return [Content(text)] if text else []  # nothing to find any more, and nothing is held back
        self._pending += text
        return _merge(self._steps(final=False))

    def flush(self) -> list[Part]:
        """The reply has ended: return what was held back."""
        return _merge(self._steps(final=True))

    def _steps(self, *, final: bool) -> Iterator[Part]:
        """Run the state machine until it needs more text."""
        while True:
            before = self._state, len(self._pending)
            yield from self._state(final)
            if not self._pending or before == (self._state, len(self._pending)):
                return

    def _open(self, final: bool) -> Iterator[Part]:
        """Templates other than Qwen3.5's leave it to the model to write `<think>`: drop it."""
        text = self._pending.lstrip()
        if not final and _THINK.startswith(text):
            return
        self._state = self._reason
        if self._inline:
            if text and not text.startswith(_THINK):
                yield Content(_THINK + "\n")
        else:
            self._pending = text.removeprefix(_THINK).lstrip()
            self._skip_space = True

    def _reason(self, final: bool) -> Iterator[Part]:
        ends = (_END_THINK, tool_calls.OPEN) if self._schemas else (_END_THINK,)
        found = [(position, end) for end in ends if (position := self._pending.find(end)) >= 0]
        if found:
            position, end = min(found)
            yield self._reasoning(self._pending[:position], end)
            self._pending = self._pending[position:].removeprefix(_END_THINK)
            self._skip_space = not self._inline
            self._state = self._answer
        elif final:
            yield self._reasoning(self._pending, "")
            self._pending = ""
        else:
            certain = len(self._pending) - _partial(self._pending, ends)
            if not self._inline:
                certain = len(self._pending[:certain].rstrip())
            yield self._reasoning(self._pending[:certain], "")
            self._pending = self._pending[certain:]

    def _reasoning(self, text: str, end: str) -> Part:
        """The think block's next text, and the tag that ends it, if it does."""
        if not self._inline:
            return Reasoning(self._lstrip(text.rstrip()))
        return Content(text + _END_THINK if end else text)

    def _answer(self, final: bool) -> Iterator[Part]:
        text = self._lstrip(self._pending)
        if self._schemas is None:
            certain = len(text)
        elif (position := text.find(tool_calls.OPEN)) >= 0:
            self._state = self._call
            self._searched = 0
            certain = len(text[:position].rstrip())
        elif final:
            certain = len(text)
        else:
            certain = len(text[: len(text) - _partial(text, (tool_calls.OPEN,))].rstrip())
        yield Content(text[:certain])
        self._pending = text[certain:]

    def _call(self, final: bool) -> Iterator[Part]:
        """`_pending` is white space, `<tool_call>` and what follows."""
        assert self._schemas is not None
        start = self._pending.index(tool_calls.OPEN) + len(tool_calls.OPEN)
        body = self._pending[start:]
        if not tool_calls.could_open(body):
            yield self._not_a_call(start)
            return
        call: Call | Broken = Broken.OPEN_VALUE
        while call is Broken.OPEN_VALUE:  # while the closing tags that are found are part of a value
            end = body.find(tool_calls.CLOSE, self._searched)
            if end < 0:
                self._searched = max(self._searched, len(body) - len(tool_calls.CLOSE) + 1)
                if final:
                    yield self._not_a_call(start)
                return
            call = parse_call(body[:end])
            self._searched = end + 1
        if isinstance(call, Broken):
            yield self._not_a_call(start)
        else:
            yield ToolCall(
                self.tool_calls, f"call_{uuid4().hex[:24]}", call.name, self._schemas.arguments(call)
            )
            self.tool_calls += 1
            self._pending = body[end + len(tool_calls.CLOSE) :]
            self._skip_space = True
            self._state = self._answer

    def _not_a_call(self, start: int) -> Part:
        """The tag was text; a call may still follow."""
        text, self._pending = self._pending[:start], self._pending[start:]
        self._state = self._answer
        return Content(text)

    def _lstrip(self, text: str) -> str:
        """Drop white space behind a tag, however many pieces it comes in."""
        if self._skip_space:
            text = text.lstrip()
            self._skip_space = not text
        return text


def _partial(text: str, tags: Sequence[str]) -> int:
    """Length of the end of `text` that is the beginning of a tag, whose only `<` is its first character."""
    start = text.rfind("<", -max(map(len, tags)))
    return len(text) - start if start >= 0 and any(tag.startswith(text[start:]) for tag in tags) else 0


def _merge(parts: Iterator[Part]) -> list[Part]:
    """Join neighbours of one kind; leave out the empty ones."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, Content) and isinstance(last, Content):
            merged[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            merged[-1] = Reasoning(last.text + part.text)
        elif isinstance(part, ToolCall) or part.text:
            merged.append(part)
    return merged
