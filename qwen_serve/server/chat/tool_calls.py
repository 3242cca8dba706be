"""Qwen3.5's tool calls as text, back to a name and JSON arguments.

    <tool_call>
    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>

Values are bare text. Their types come from the tool's JSON schema. Models drift from this form; a call of an
offered tool is read as what it means where the schema leaves no doubt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

from .markup import Tags, spelled
from .scanner import Parser, Scanner
from .tool_schemas import ToolSchemas
from .values import read_object, typed

FUNCTION = "<function="
_END_FUNCTION = "</function>"
_PARAMETER = "<parameter="
_END_PARAMETER = "</parameter>"
_DAMAGED_FUNCTION, _DAMAGED_PARAMETER = "</function", "</parameter"
_SPOILT = re.compile(r"=[\w.-]{0,64}|[/\w]{0,10}")
"""What stands between `</parameter` or `</function` and its `>`, as in `</parameter1>`, if there is a `>`."""
_NAMED_FUNCTION, _NAMED_PARAMETER = "<function name=", "<parameter name="

_SURROGATE = re.compile("[\ud800-\udfff]")


class Reading(NamedTuple):
    """How calls are read."""

    schemas: ToolSchemas
    tags: Tags
    drifts: bool
    """Whether calls may have drifted from their form. Not where a grammar enforces it, and then a value may
    contain what looks like the next parameter."""


class CallReader:
    """Reads a call, after its `<tool_call>`, and writes its arguments as JSON at the same time.

    A parameter's value may contain `</parameter>`. It ends only at a `</parameter>` that the next parameter
    or the function's end follows. If a parameter is given twice, the first value counts.

    These drifts are understood, too, in the call of an offered tool: a missing `</parameter>` before
    `</function>`, before `</tool_call>`, and before a line with a declared parameter that has no value yet; a
    missing `</function>`; a missing `>`; names in closing tags; quoted names; `<parameter=` in place of
    `<function=`; `<function name=` and `<parameter name=`; arguments, or the whole call, as JSON.
    """

    def __init__(self, scanner: Scanner, reading: Reading) -> None:
        self._scanner = scanner
        self._schemas, self._tags, self._drifts = reading
        self.name = ""
        self.closed = False
        """Whether the `</tool_call>` has been read."""
        self._key: str | None = None  # the next value's parameter, if there is one
        self._whole: str | None = None  # all arguments, if they are written as JSON
        self._written: set[str] = set()
        self._parameter = _PARAMETER
        self._quoted = 0  # calls quoted in the current value that are not closed yet

    @property
    def offered(self) -> bool:
        """Whether the tool is offered."""
        return self.name in self._schemas

    @property
    def _lenient(self) -> bool:
        return self._drifts and self.offered

    def begin(self, *, function: bool = False) -> Parser[bool]:
        """Reads up to the first parameter's value; with `function` the `<function=` has been read. Returns
        whether it is a call; its `name` is known then."""
        tag = FUNCTION
        if not function:
            yield from self._scanner.spaces()
            while self._drifts and (yield from self._scanner.tag(self._tags.call)):
                yield from self._scanner.spaces()
            openings = (FUNCTION, _NAMED_FUNCTION, _PARAMETER, "{") if self._drifts else (FUNCTION,)
            tag = yield from self._scanner.tag(*openings, take=False)
            if not tag or tag == "{":
                return bool(tag) and (yield from self._json())
            yield from self._scanner.tag(tag)
        self.name = yield from self._name(self._schemas.__contains__)
        if not self.name or (tag != FUNCTION and not self.offered):
            return False
        if tag == _NAMED_FUNCTION:
            self._parameter = _NAMED_PARAMETER
        yield from self._scanner.spaces()
        if self._lenient and (yield from self._scanner.tag("{", take=False)):
            return (yield from self._json())
        return (yield from self._heading())

    def arguments(self, emit: Callable[[str], None]) -> Parser[bool]:
        """Reads up to the function's end and emits a JSON object in pieces. Returns whether the text got that
        far."""
        if self._whole is not None:
            emit(self._whole)
            return True
        emit("{")
        while (key := self._key) is not None:
            types = self._schemas.types(self.name, key)
            start = f"{', ' if self._written else ''}{json.dumps(key, ensure_ascii=False)}: "
            value: _Text | _Typed
            if key in self._written:
                value = _Typed(start, types, lambda _: None)
            elif types <= {"string"}:
                value = _Text(start, emit)
            else:
                value = _Typed(start, types, emit)
            self._written.add(key)
            if not (yield from self._value(value)):
                return False
        emit("}")
        return True

    # --- tags ----------------------------------------------------------------------------------------------

    def _name(self, known: Callable[[str], bool]) -> Parser[str]:
        """Reads the rest of an opening tag. A `known` name may lack its `>`, and be quoted."""
        if not self._drifts:
            return (yield from self._scanner.name())
        name = yield from self._scanner.name(known)
        bare = name.strip("\"'")
        return bare if known(bare) else name

    def _declares(self, key: str) -> bool:
        return self._schemas.declares(self.name, key)

    def _heading(self) -> Parser[bool]:
        """Reads `<parameter=key>` or the function's end. Returns whether either is there."""
        ends = (_DAMAGED_FUNCTION, self._tags.end_call) if self._lenient else (_END_FUNCTION,)
        tag = yield from self._scanner.tag(self._parameter, *ends)
        self._key = (yield from self._name(self._declares)) if tag == self._parameter else None
        self.closed = tag == self._tags.end_call
        if tag == _DAMAGED_FUNCTION and not (yield from self._closing()):
            return (yield from self.ends_here())
        return bool(self._key or (tag and tag != self._parameter))

    def _closing(self) -> Parser[bool]:
        """Reads the rest of a closing tag. Returns whether it is as it should be."""
        spoilt = yield from self._scanner.matching(_SPOILT)
        return bool((yield from self._scanner.tag(">"))) and not spoilt

    def ends_here(self) -> Parser[bool]:
        """Whether nothing of the call follows a `</function>`. Reads a `</tool_call>` that does."""
        yield from self._scanner.spaces()
        self.closed = bool((yield from self._scanner.tag(self._tags.end_call)))
        if self.closed or (self._scanner.ended and self._scanner.empty):
            return True
        follows = self._tags.call, self._tags.end_think, FUNCTION
        return bool((yield from self._scanner.tag(*follows, take=False)))

    # --- values --------------------------------------------------------------------------------------------

    def _value(self, value: _Text | _Typed) -> Parser[bool]:
        """Reads a value and the heading after it. Returns whether they ended before the text did."""
        body = _Lines(value.add)
        self._quoted = 0
        ends: tuple[str, ...] = (_END_PARAMETER,)
        if self._lenient:
            ends = (_DAMAGED_PARAMETER, _DAMAGED_FUNCTION, FUNCTION, _PARAMETER, self._tags.end_call)
        while end := (yield from self._scanner.until(ends, body.add, whole=False)):
            with self._scanner.recording() as tape:
                ended = yield from self._ended(end, on_line=body.on_line)
            if ended or (end.startswith(_DAMAGED_PARAMETER) and self._scanner.broke_off):
                value.close()
                return ended or self._is_enough()
            body.add(end + "".join(tape))
        return False

    def _ended(self, end: str, *, on_line: bool) -> Parser[bool]:
        """Whether the text at `end` ends the value. Reads what follows it to find out."""
        scanner = self._scanner
        if end == FUNCTION:
            self._quoted += on_line
            return False
        if end == _PARAMETER:
            return on_line and (yield from self._next_parameter())
        if end == _DAMAGED_FUNCTION and self._quoted:
            self._quoted -= 1
            return False
        if end == _DAMAGED_FUNCTION:
            self._key = None
            yield from self._closing()
            return (yield from self.ends_here())
        if end == self._tags.end_call:
            self._key = None
            yield from scanner.spaces()
            self.closed = (scanner.ended and scanner.empty) or bool(
                (yield from scanner.tag(self._tags.call, self._tags.end_think, take=False))
            )
            return self.closed
        if end != _END_PARAMETER:
            yield from self._closing()
        yield from scanner.spaces()
        if not (yield from self._heading()):
            return False
        if self._quoted and self._key is None and not self.closed:
            return (yield from self.ends_here())
        return not self._quoted or self._key is None or self._is_next(self._key)

    def _next_parameter(self) -> Parser[bool]:
        """Whether the name of the next parameter follows, where the value before it was not closed."""
        key = yield from self._name(self._declares)
        if self._quoted or not self._is_next(key):
            return False
        self._key = key
        return True

    def _is_next(self, key: str) -> bool:
        return key not in self._written and self._declares(key)

    def _is_enough(self) -> bool:
        """Whether the call is complete although the model ended it after a value."""
        scanner = self._scanner
        enough = self._lenient and scanner.empty and not scanner.limited
        if enough:
            self._key = None
        return enough and self._schemas.required(self.name) <= self._written

    # --- JSON ----------------------------------------------------------------------------------------------

    def _json(self) -> Parser[bool]:
        """Reads arguments as a JSON object, or a whole call with `name` and `arguments`."""
        scanner, pieces = self._scanner, list[str]()
        end = yield from scanner.until((_END_FUNCTION, self._tags.end_call), pieces.append)
        self.closed = end == self._tags.end_call
        found = read_object(spelled("".join(pieces))) if end or not scanner.limited else None
        if found is not None and not self.name:
            name, found = found.get("name"), found.get("arguments", found.get("parameters"))
            self.name = name if isinstance(name, str) and name in self._schemas else ""
        if isinstance(found, str):
            found = read_object(found)
        if not isinstance(found, dict) or not self.name:
            return False
        self._whole = json.dumps(found, ensure_ascii=False)
        return True


class _Lines:
    """Passes a value on without the line breaks that separate it from its tags."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._begun = False
        self._held = ""
        self.on_line = True
        """Whether a line has just begun."""

    def add(self, text: str) -> None:
        if text:
            self.on_line = text.endswith("\n")
        if text and not self._begun:
            self._begun = True
            text = text.removeprefix("\n")
        if text:
            kept = text.removesuffix("\n")
            self._emit(self._held + kept)
            self._held = text[len(kept) :]


class _Text:
    """A string value, written as it arrives."""

    def __init__(self, start: str, emit: Callable[[str], None]) -> None:
        self._emit = emit
        emit(f'{start}"')

    def add(self, text: str) -> None:
        self._emit(json.dumps(spelled(text), ensure_ascii=False)[1:-1])

    def close(self) -> None:
        self._emit('"')


class _Typed:
    """A value that is parsed as a whole."""

    def __init__(self, start: str, types: set[str], emit: Callable[[str], None]) -> None:
        self._start = start
        self._types = types
        self._emit = emit
        self._pieces: list[str] = []

    def add(self, text: str) -> None:
        self._pieces.append(text)

    def close(self) -> None:
        value = typed(spelled("".join(self._pieces)), self._types)
        # half a surrogate pair has no UTF-8 and stays an escape
        written = _SURROGATE.sub(
            lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False)
        )
        self._emit(self._start + written)


def begun_name(text: str) -> str:
    """The name in the beginning of a call, after its `<tool_call>`, as far as it is written."""
    return text.partition(FUNCTION)[2].strip()
