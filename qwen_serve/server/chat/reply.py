"""Splits a streaming reply into reasoning, answer and tool calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from uuid import uuid4

from qwen_serve.server.engine import FinishReason

from .detokenizer import StopFilter
from .generation import TextGeneration
from .markup import Tags, spelled
from .scanner import Parser, Scanner, Trimmed
from .tool_calls import FUNCTION, CallReader, Reading, begun_name
from .tool_schemas import ToolSchemas


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
                for part in self._shown(self._parser.feed(text.decode(tokens))):
                    yield part
                    if self._one_call and isinstance(part, Arguments) and part.last:
                        return
                if text.stopped:
                    break
            text.ended = True
            for part in self._shown(self._parser.flush(limited=text.finish_reason == "length")):
                yield part
        finally:
            text.cancel()

    def _shown(self, parts: list[Part]) -> list[Part]:
        return parts if self._reasoning else [part for part in parts if not isinstance(part, Reasoning)]

    @property
    def finish_reason(self) -> FinishReason | Literal["tool_calls"] | None:
        """The generation's finish reason; "tool_calls" for a reply that ended by itself and has calls, and
        "length" if it ended inside a call or its think block."""
        reason = self.generation.finish_reason
        if self._parser.unfinished and reason == "stop":
            return "length"
        if self._parser.tool_calls and (self._one_call or reason == "stop"):
            return "tool_calls"
        return reason


class ReplyParser:
    """Takes text in pieces of any size. The joined parts do not depend on how the text was cut.

    With `thinking` the prompt opened a think block. The reply begins inside it, and the block ends with
    `</think>` or, if there are tools, with a `<tool_call>` that a call follows. White space around the
    reasoning, and before the answer, belongs to the tags. If the reply ends before such a tag, all of it is
    reasoning. `inline_reasoning` leaves the think block in the content as the model wrote it, with its
    opening tag added.

    `tools` are OpenAI's tool objects. Without any, the parser does not look for tool calls. The arguments of
    an offered tool are streamed from its first parameter on; a call with another name is returned as a whole.
    White space around a call is dropped. Text that turns out not to be a call is content, unchanged.
    `forced` are the tools one of which must be called, if that is required.

    A call that is cut off, by a token limit or although it is forced, is no content, wherever its text ends.
    Before its name is complete it is dropped, unless only one of the forced tools has a name that begins so.

    `tokens` are the tags that are tokens of the vocabulary (`markup`): then nothing else is such a tag. Then,
    too, what the model may have meant by a call that drifted from its form is understood, unless a grammar
    enforces the form (`enforced`), and if the prompt `closed` a think block, a `</think>` that closes nothing
    is dropped, as is a `<think>` at the end. With tools so is a `</tool_call>` that closes nothing. `stops`
    cuts the content, and nothing else. If the request has `stop_tokens`, its think block may end with one.
    """

    def __init__(
        self,
        *,
        thinking: bool,
        inline_reasoning: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        forced: Collection[str] = (),
        tokens: Collection[str] = (),
        enforced: bool = False,
        closed: bool = False,
        stops: StopFilter | None = None,
        stop_tokens: bool = False,
    ) -> None:
        self._inline, self._stop_tokens = inline_reasoning, stop_tokens
        self._tags = tags = Tags.of(tokens)
        drifts = tags.exact and not enforced
        self._reading = Reading(ToolSchemas(tools), tags, drifts) if tools else None
        self._closed = closed and Tags().end_think in tokens
        self._forced = frozenset(forced)
        self._cut_off = False
        """Whether an unfinished call at the end is no content."""
        self._scanner = Scanner()
        self._stops = stops
        self._answer = _Answer(self._scanner, stops, self._content)
        self._parts: list[Part] = []
        self._parser = self._reply(thinking)
        self.tool_calls = 0
        """Number of complete calls so far."""
        self.unfinished = False
        """Whether the reply ended inside a call or its think block."""

    def feed(self, text: str) -> list[Part]:
        """Takes more of the reply; returns the parts that are now final."""
        if not text:
            return []
        self._scanner.add(text)
        return self._read_on()

    def flush(self, *, limited: bool = False) -> list[Part]:
        """Ends the reply, which a token limit may have cut off; returns the text held back."""
        self._scanner.ended, self._scanner.limited = True, limited
        self._cut_off = limited or bool(self._forced)
        return self._read_on()

    def _read_on(self) -> list[Part]:
        next(self._parser, None)
        parts, self._parts = self._parts, []
        return parts

    def _reply(self, thinking: bool) -> Parser[None]:
        with suppress(_Stopped):
            yield from self._whole(thinking)
        self._answer.release()

    def _whole(self, thinking: bool) -> Parser[None]:
        tags, answer = self._tags, self._answer
        called = False
        if thinking or (self._closed and (yield from self._reopened())):
            end = yield from self._think_block()
            while (
                end == tags.end_think and self._closed and not self._inline and (yield from self._reopened())
            ):
                end = yield from self._think_block(after="\n\n")
            called = end == tags.call
        ends = [tags.call, FUNCTION] if self._reading and self._reading.drifts else []
        ends += [tags.call] if self._reading and not ends else []
        ends += [tags.end_call] if self._reading and self._reading.drifts else []
        ends += [tags.end_think, tags.think] if self._closed else []
        while end := tags.call if called else (yield from self._scanner.until(ends, answer.add)):
            called = False
            if end in (tags.end_think, tags.end_call):
                yield from self._closing(end)
            elif end == tags.think:
                space = yield from self._scanner.spaces()
                if not (self._scanner.ended and self._scanner.empty):  # else nothing is thought
                    answer.add(end + space)
            elif end == FUNCTION:
                yield from self._bare_call()
            else:
                yield from self._call(answer)

    # --- the think block -----------------------------------------------------------------------------------

    def _reopened(self) -> Parser[bool]:
        """Whether the answer begins with a think block of its own, although there was one."""
        space = yield from self._scanner.spaces()
        if (yield from self._scanner.tag(self._tags.think, take=False)):
            return True
        self._answer.add(space)
        return False

    def _think_block(self, after: str = "") -> Parser[str]:
        """Reads the reasoning and, if it ends in one, its `</think>` or its call. Returns a `<tool_call>`
        that has not been read as a call. `after` parts it from earlier reasoning."""
        tags = self._tags
        ends = (tags.end_think, tags.call) if self._reading else (tags.end_think,)
        space = yield from self._scanner.spaces()
        # other templates than Qwen3.5's leave the opening tag to the model
        opening = yield from self._scanner.tag(tags.think)
        thoughts: Trimmed | _Inline
        if self._inline:
            missing = "" if opening or self._scanner.empty else f"{Tags().think}\n"
            self._content(missing + space + opening)
            thoughts = _Inline(self._content)
        else:
            yield from self._scanner.spaces()
            thoughts = Trimmed(self._reasoning)
            thoughts.add(after)
        while end := (yield from self._scanner.until(ends, thoughts.add)):
            if end == tags.call and tags.exact:
                if (yield from self._call(thoughts)):
                    return ""
                continue
            thoughts.drop()
            if end == tags.end_think and not self._inline:
                yield from self._scanner.spaces()
            return end
        self.unfinished = not self._stop_tokens
        return ""

    def _closing(self, tag: str) -> Parser[None]:
        """Drops a `</think>` or `</tool_call>` that closes nothing: at the beginning of the answer, or at the
        end of a line."""
        answer = self._answer
        if tag == self._tags.end_call and answer.holds_markup:
            answer.add(tag)
            answer.holds_markup = False
            return
        begun, on_line = answer.begun, answer.on_line
        space = yield from self._scanner.spaces()
        if not begun or self._scanner.empty:
            answer.drop()
        elif "\n" in space:
            answer.restart()
            answer.add(space.removeprefix("\n") if on_line else space)
        else:
            answer.add(tag + space)

    # --- calls ---------------------------------------------------------------------------------------------

    def _call(self, around: _Answer | Trimmed | _Inline) -> Parser[bool]:
        """Reads the text after a `<tool_call>`. Returns whether it is a call, perhaps a cut one; `around`
        holds the white space before it."""
        follows = yield from self._one_call(around, self._tags.call)
        yield from self._more_calls(follows)
        return follows is not None

    def _more_calls(self, follows: str | None) -> Parser[None]:
        """Reads further calls of one `<tool_call>`, as long as a `<function=` follows."""
        while follows:
            follows = yield from self._one_call(self._answer, follows)

    def _one_call(self, around: _Answer | Trimmed | _Inline, tag: str) -> Parser[str | None]:
        """Reads a call after its `tag`; returns the tag of the next one, if it follows. None if it is no
        call."""
        assert self._reading is not None
        call = CallReader(self._scanner, self._reading)
        pieces: list[str] = []
        with self._scanner.recording() as tape:
            is_call = yield from call.begin(function=tag == FUNCTION)
            if is_call and not call.offered:
                is_call = yield from call.arguments(pieces.append)
        # where the tag is a token, text that ends behind it is the beginning of a call, whatever ended it
        cut_off = not is_call and self._scanner.broke_off and (self._cut_off or self._tags.exact)
        if not is_call and not cut_off:
            around.add(tag + "".join(tape))
            self._answer.holds_markup = around is self._answer
            return None
        around.drop()
        name = call.name or self._only_name(begun_name(spelled("".join(tape))))
        index = self._begun(name, pieces) if name else self.tool_calls
        if cut_off or (call.offered and not (yield from call.arguments(partial(self._arguments, index)))):
            self._scanner.rest()
            self.unfinished = True
            return ""
        return (yield from self._end_call(call, index))

    def _begun(self, name: str, pieces: list[str]) -> int:
        """Begins a call with what is known of its arguments; returns its index."""
        self._parts.append(ToolCall(self.tool_calls, f"call_{uuid4().hex[:24]}", name))
        self._arguments(self.tool_calls, "".join(pieces))
        return self.tool_calls

    def _end_call(self, call: CallReader, index: int) -> Parser[str]:
        """Ends a call. Returns the tag of another one in the same `<tool_call>`."""
        assert self._reading is not None
        self._arguments(index, "", last=True)
        self.tool_calls += 1
        yield from self._scanner.spaces()
        if not (call.closed or (yield from self._scanner.tag(self._tags.end_call))):
            return (yield from self._scanner.tag(FUNCTION)) if self._reading.drifts else ""
        yield from self._scanner.spaces()
        return ""

    def _bare_call(self) -> Parser[None]:
        """Reads the text after a `<function=` outside a `<tool_call>`. It is a call if it begins a line and
        is complete, and if a `</tool_call>` follows it, or if the answer is nothing else."""
        assert self._reading is not None
        answer, call = self._answer, CallReader(self._scanner, self._reading)
        alone = not answer.begun
        pieces: list[str] = []
        with self._scanner.recording() as tape:
            is_call = answer.on_line and (yield from call.begin(function=True))
            is_call = is_call and call.offered and (yield from call.arguments(pieces.append))
            is_call = is_call and (call.closed or (yield from call.ends_here()))
        if not is_call or not (alone or call.closed):
            answer.add(FUNCTION + "".join(tape))
            answer.holds_markup = True
            return
        answer.drop()
        yield from self._more_calls((yield from self._end_call(call, self._begun(call.name, pieces))))

    def _only_name(self, beginning: str) -> str:
        """The forced tool whose name begins so; "" if there is none or more than one."""
        names = [name for name in self._forced if name.startswith(beginning)]
        return names[0] if len(names) == 1 else ""

    # --- parts ---------------------------------------------------------------------------------------------

    def _content(self, text: str) -> None:
        last = self._parts[-1] if self._parts else None
        if isinstance(last, Content):
            self._parts[-1] = Content(last.text + spelled(text))
        elif text:
            self._parts.append(Content(spelled(text)))

    def _reasoning(self, text: str) -> None:
        self._settle()
        last = self._parts[-1] if self._parts else None
        if isinstance(last, Reasoning):
            self._parts[-1] = Reasoning(last.text + spelled(text))
        elif text:
            self._parts.append(Reasoning(spelled(text)))

    def _arguments(self, index: int, text: str, *, last: bool = False) -> None:
        self._settle()
        before = self._parts[-1] if self._parts else None
        if isinstance(before, Arguments) and before.index == index:
            self._parts[-1] = Arguments(index, before.text + text, last)
        elif text or last:
            self._parts.append(Arguments(index, text, last))

    def _settle(self) -> None:
        """No stop string can cut the text that has been read."""
        if self._stops is not None:
            self._stops.settled = self._scanner.position


class _Stopped(Exception):
    """A stop string is complete."""


class _Answer:
    """The answer's text: cut at a stop string; white space at its end is held back."""

    def __init__(self, scanner: Scanner, stops: StopFilter | None, emit: Callable[[str], None]) -> None:
        self._scanner, self._stops = scanner, stops
        self._trimmed = Trimmed(emit)
        self.begun = False
        """Whether there is text since the beginning or the last call."""
        self.on_line = True
        """Whether a line has just begun."""
        self.holds_markup = False
        """Whether a `</tool_call>` closes something that was not read as a call."""

    def add(self, text: str) -> None:
        """Appends text that has just been read. Raises _Stopped."""
        if text:
            self.begun = self.begun or not text.isspace()
            self.on_line = text.endswith("\n") or not self.begun
        if self._stops is None:
            self._trimmed.add(text)
            return
        self._trimmed.add(self._stops.feed(text, self._scanner.position - len(text)))
        if self._stops.stop_string is not None:
            raise _Stopped

    def restart(self) -> None:
        """No stop string reaches across this place."""
        if self._stops is not None:
            self._trimmed.add(self._stops.flush())

    def drop(self) -> None:
        """Drops the white space, which belongs to a tag."""
        self.restart()
        self._trimmed.drop()
        self.begun, self.on_line = False, True

    def release(self) -> None:
        """Passes on all text."""
        self.restart()
        self._trimmed.release()


class _Inline:
    """Reasoning as part of the content."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self.add = emit

    def drop(self) -> None:
        """Closes the block before a tag."""
        self.add(Tags().end_think)
