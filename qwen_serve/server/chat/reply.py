"""Splits a streaming reply into reasoning, answer and tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

from . import tool_calls
from .scanner import Parser, Scanner, Trimmed
from .tool_calls import CallReader, ToolSchemas

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Mapping, Sequence

    from qwen_serve.server.engine import FinishReason

    from .generation import TextGeneration

_THINK = "<think>"
_END_THINK = "</think>"


@dataclass(frozen=True)
class Reasoning:
    """A piece of the think block's text."""

    text: str


@dataclass(frozen=True)
class Content:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A call begins."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """A piece of a call's arguments. Joined, the pieces are a JSON object, complete with the `last` one.

    If the reply ends inside a call, no piece is the last, and the object stays incomplete, so that nobody
    takes it for a complete one.
    """

    index: int
    text: str
    last: bool = False


NOTHING_YET = Content("")

Part = Reasoning | Content | ToolCall | Arguments


class Reply:
    """A generation in parts: `async for part in reply`, once. Raises what the generation raises.

    If the prompt's progress is wanted, an empty Content reports it. With `one_call` the reply ends after its
    first tool call. Without `reasoning`, reasoning is left out.
    """

    def __init__(
        self,
        generation: TextGeneration,
        parser: ReplyParser,
        *,
        one_call: bool = False,
        reasoning: bool = True,
    ) -> None:
        self.generation = generation
        self._parser = parser
        self._one_call = one_call
        self._reasoning = reasoning

    async def __aiter__(self) -> AsyncIterator[Part]:
        text = self.generation
        try:
            async for tokens in text.generation:
                if not tokens:
                    yield NOTHING_YET
                for part in self._parts(text.feed(tokens)):
                    yield part
                    if self._one_call and isinstance(part, Arguments) and part.last:
                        return
                if text.stopped:
                    break
            for part in self._parts(text.flush(), last=True):
                yield part
        finally:
            text.cancel()

    def _parts(self, text: str, *, last: bool = False) -> list[Part]:
        parts = self._parser.feed(text) if text else []
        parts += self._parser.flush(limited=self.generation.finish_reason == "length") if last else []
        return parts if self._reasoning else [part for part in parts if not isinstance(part, Reasoning)]

    @property
    def finish_reason(self) -> FinishReason | Literal["tool_calls"] | None:
        """The generation's finish reason, or "tool_calls" for a reply that ended by itself and has calls."""
        reason = self.generation.finish_reason
        if self._parser.tool_calls and (self._one_call or reason == "stop"):
            return "tool_calls"
        return reason


class ReplyParser:
    """Takes text in pieces of any size. The joined parts do not depend on how the text was cut.

    With `thinking` the prompt opened a think block. The reply begins inside it, and the block ends with
    `</think>` or, if there are tools, with a `<tool_call>`. White space around the reasoning, and before the
    answer, belongs to the tags. If the reply ends before such a tag, all of it is reasoning.
    `inline_reasoning` leaves the think block in the content as the model wrote it, with its opening tag
    added.

    `tools` are OpenAI's tool objects. Without any, the parser does not look for tool calls. The arguments of
    an offered tool are streamed from its first parameter on; a call with another name is returned as a whole.
    White space around a call is dropped. Text that turns out not to be a call is content, unchanged.
    `forced` are the tools one of which must be called, if that is required.

    A call that is cut off, by a token limit or although it is forced, is no content, wherever its text ends.
    Before its name is complete it is dropped, unless only one of the forced tools has a name that begins so.
    """

    def __init__(
        self,
        *,
        thinking: bool,
        inline_reasoning: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        forced: Collection[str] = (),
    ) -> None:
        self._inline = inline_reasoning
        self._schemas = ToolSchemas(tools) if tools else None
        self._forced = frozenset(forced)
        self._cut_off = False
        """Whether an unfinished call at the end is no content."""
        self._scanner = Scanner()
        self._parts: list[Part] = []
        self._parser = self._reply(thinking)
        self._plain = False  # whether the rest is plain text, passed on at once
        self.tool_calls = 0
        """Number of complete calls so far."""

    def feed(self, text: str) -> list[Part]:
        """Takes more of the reply; returns the parts that are now final."""
        if self._plain:
            return [Content(text)] if text else []
        self._scanner.add(text)
        return self._read_on()

    def flush(self, *, limited: bool = False) -> list[Part]:
        """Ends the reply, which a token limit may have cut off; returns the text held back."""
        self._scanner.ended = True
        self._cut_off = limited or bool(self._forced)
        return self._read_on()

    def _read_on(self) -> list[Part]:
        next(self._parser, None)
        parts, self._parts = self._parts, []
        return parts

    def _reply(self, thinking: bool) -> Parser[None]:
        tag = (yield from self._think_block()) if thinking else ""
        if self._schemas is None:
            self._plain = True
            yield from self._scanner.until((), self._content)
            return
        content = Trimmed(self._content)
        while tag == tool_calls.OPEN or (yield from self._scanner.until((tool_calls.OPEN,), content.add)):
            yield from self._call(self._schemas, content)
            tag = ""
        content.release()

    def _think_block(self) -> Parser[str]:
        """Reads the reasoning and the tag after it, which it returns."""
        ends = (_END_THINK, tool_calls.OPEN) if self._schemas else (_END_THINK,)
        space = yield from self._scanner.spaces()
        # other templates than Qwen3.5's leave the opening tag to the model
        opening = yield from self._scanner.tag(_THINK)
        if self._inline:
            missing = "" if opening or self._scanner.empty else f"{_THINK}\n"
            self._content(missing + space + opening)
            end = yield from self._scanner.until(ends, self._content)
            self._content(_END_THINK if end else "")
            return end
        yield from self._scanner.spaces()
        end = yield from self._scanner.until(ends, Trimmed(self._reasoning).add)
        if end == _END_THINK:
            yield from self._scanner.spaces()
        return end

    def _call(self, schemas: ToolSchemas, content: Trimmed) -> Parser[None]:
        """Reads the text after a `<tool_call>`; `content` still holds the white space before it."""
        call = CallReader(self._scanner, schemas)
        pieces: list[str] = []
        with self._scanner.recording() as tape:
            is_call = yield from call.begin()
            offered = call.name in schemas
            if is_call and not offered:
                is_call = yield from call.arguments(pieces.append)
        cut_off = not is_call and self._cut_off and self._scanner.broke_off
        if not is_call and not cut_off:
            content.add(tool_calls.OPEN + "".join(tape))
            return
        content.drop()
        index = self.tool_calls
        if name := call.name or self._only_name(tool_calls.begun_name("".join(tape))):
            self._parts.append(ToolCall(index, f"call_{uuid4().hex[:24]}", name))
            self._arguments(index, "".join(pieces))
        if cut_off or (offered and not (yield from call.arguments(partial(self._arguments, index)))):
            self._scanner.rest()
            return
        self._arguments(index, "", last=True)
        self.tool_calls += 1
        yield from self._scanner.spaces()
        yield from self._scanner.tag(tool_calls.CLOSE)
        yield from self._scanner.spaces()

    def _only_name(self, beginning: str) -> str:
        """The forced tool whose name begins so; "" if there is none or more than one."""
        names = [name for name in self._forced if name.startswith(beginning)]
        return names[0] if len(names) == 1 else ""

    def _content(self, text: str) -> None:
        last = self._parts[-1] if self._parts else None
        if isinstance(last, Content):
            self._parts[-1] = Content(last.text + text)
        elif text:
            self._parts.append(Content(text))

    def _reasoning(self, text: str) -> None:
        last = self._parts[-1] if self._parts else None
        if isinstance(last, Reasoning):
            self._parts[-1] = Reasoning(last.text + text)
        elif text:
            self._parts.append(Reasoning(text))

    def _arguments(self, index: int, text: str, *, last: bool = False) -> None:
        before = self._parts[-1] if self._parts else None
        if isinstance(before, Arguments) and before.index == index:
            self._parts[-1] = Arguments(index, before.text + text, last)
        elif text or last:
            self._parts.append(Arguments(index, text, last))
