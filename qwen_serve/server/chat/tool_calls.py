"""Qwen3.5's tool calls as text, back to a name and JSON arguments.

    <tool_call>
    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>

Values are bare text. Their types come from the tool's JSON schema.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .scanner import Parser, Scanner

OPEN = "<tool_call>"
CLOSE = "</tool_call>"

_FUNCTION = "<function="
_END_FUNCTION = "</function>"
_PARAMETER = "<parameter="
_END_PARAMETER = "</parameter>"
_IMPLIED = {
    "properties": "object",
    "additionalProperties": "object",
    "items": "array",
    "prefixItems": "array",
}
"""Keyword -> the type that a schema without a `type` means by it."""

_SURROGATE = re.compile("[\ud800-\udfff]")


class ToolSchemas:
    """The parameter schemas of a request's tools (OpenAI's objects), which give call arguments their
    types."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        functions = [_dict(tool.get("function")) for tool in tools]
        self._schemas = {function.get("name"): _dict(function.get("parameters")) for function in functions}

    def __contains__(self, name: str) -> bool:
        """Whether a tool of this name is offered."""
        return name in self._schemas

    def types(self, name: str, parameter: str) -> set[str]:
        """The JSON types of a tool's parameter; empty if its schema does not say."""
        schema = self._schemas.get(name, {})
        described: list[object] = []
        for part in _parts(schema, schema):
            given = _dict(part.get("properties"))
            described.append(given[parameter] if parameter in given else part.get("additionalProperties"))
        return {name for one in described for name in _types(one, schema)}


class CallReader:
    """Reads a call, after its `<tool_call>`, and writes its arguments as JSON at the same time.

    A parameter's value may contain `</parameter>`. It ends only at a `</parameter>` that the next parameter
    or the function's end follows. If a parameter is given twice, the first value counts.
    """

    def __init__(self, scanner: Scanner, schemas: ToolSchemas) -> None:
        self._scanner = scanner
        self._schemas = schemas
        self.name = ""
        self._key: str | None = None  # the next value's parameter, if there is one

    def begin(self) -> Parser[bool]:
        """Reads up to the first parameter's value. Returns whether it is a call; its `name` is known then."""
        yield from self._scanner.spaces()
        if not (yield from self._scanner.tag(_FUNCTION)):
            return False
        self.name = yield from self._scanner.name()
        if not self.name:
            return False
        yield from self._scanner.spaces()
        return (yield from self._heading())

    def arguments(self, emit: Callable[[str], None]) -> Parser[bool]:
        """Reads up to the function's end and emits a JSON object in pieces. Returns whether the text got that
        far."""
        emit("{")
        written: set[str] = set()
        while (key := self._key) is not None:
            types = self._schemas.types(self.name, key)
            start = f"{', ' if written else ''}{json.dumps(key, ensure_ascii=False)}: "
            value: _Text | _Typed
            if key in written:
                value = _Typed(start, types, lambda _: None)
            elif types <= {"string"}:
                value = _Text(start, emit)
            else:
                value = _Typed(start, types, emit)
            written.add(key)
            if not (yield from self._value(value)):
                return False
        emit("}")
        return True

    def _heading(self) -> Parser[bool]:
        """Reads `<parameter=key>` or `</function>`. Returns whether either is there."""
        tag = yield from self._scanner.tag(_PARAMETER, _END_FUNCTION)
        self._key = (yield from self._scanner.name()) if tag == _PARAMETER else None
        return bool(self._key or tag == _END_FUNCTION)

    def _value(self, value: _Text | _Typed) -> Parser[bool]:
        """Reads a value and the heading after it. Returns whether they ended before the text did."""
        body = _Lines(value.add)
        while (yield from self._scanner.until((_END_PARAMETER,), body.add, whole=False)):
            with self._scanner.recording() as tape:
                yield from self._scanner.spaces()
                ended = yield from self._heading()
            if ended or self._scanner.broke_off:
                value.close()
                return ended
            body.add(_END_PARAMETER + "".join(tape))
        return False


class _Lines:
    """Passes a value on without the line breaks that separate it from its tags."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._begun = False
        self._held = ""

    def add(self, text: str) -> None:
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
        self._emit(json.dumps(text, ensure_ascii=False)[1:-1])

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
        value = _typed("".join(self._pieces), self._types)
        # half a surrogate pair has no UTF-8 and stays an escape
        written = _SURROGATE.sub(
            lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False)
        )
        self._emit(self._start + written)


def begun_name(text: str) -> str:
    """The name in the beginning of a call, after its `<tool_call>`, as far as it is written."""
    return text.partition(_FUNCTION)[2].strip()


def _types(schema: object, root: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema allows; empty if it does not say."""
    types: set[str] = set()
    for part in _parts(schema, root):
        declared = part.get("type")
        names = {name for name in [declared, *_list(declared)] if isinstance(name, str)}
        if not names:
            options = [part["const"]] if "const" in part else _list(part.get("enum"))
            names = {name for option in options for name in _names(option)}
            names |= {_IMPLIED[key] for key in _IMPLIED.keys() & part.keys()}
        types |= names
    return types


def _parts(schema: object, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A schema, what it refers to and its alternatives, each once."""
    seen: set[int] = set()  # `$ref` can be cyclic
    unread = [schema]
    while unread:
        part = unread.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        unread += (option for key in ("anyOf", "oneOf", "allOf") for option in _list(part.get(key)))
        if "$ref" in part:
            unread.append(resolve(part["$ref"], root))


def described_elsewhere(schema: Mapping[str, Any]) -> bool:
    """Whether a tool's schema describes its parameters only elsewhere than in its `properties`."""
    top = followed(schema, schema) or {}
    others = top.keys() & {"allOf", "anyOf", "oneOf", "patternProperties"}
    return not top.get("properties") and bool(others or top.get("additionalProperties"))


def followed(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema at the end of a chain of references; None if it leads nowhere."""
    for _ in range(16):
        if "$ref" not in schema:
            return schema
        found = resolve(schema["$ref"], root)
        if not isinstance(found, Mapping):
            break
        schema = found
    return None


def resolve(reference: object, root: Mapping[str, Any]) -> object:
    """Follows a reference inside the same schema, `#/$defs/name`; None if the target is missing."""
    found: object = root
    for key in str(reference).removeprefix("#/").split("/"):
        found = _dict(found).get(key.replace("~1", "/").replace("~0", "~"))
    return found


def _typed(text: str, types: set[str]) -> Any:
    """The value that `text` spells, if it has one of `types`; otherwise the text itself."""
    if not types or types == {"string"}:
        return text
    word = text.strip()
    # Python's spellings too, since the template writes the scalars of earlier calls that way
    word = {"True": "true", "False": "false", "None": "null"}.get(word, word)
    try:
        value = json.loads(word, parse_constant=_no_json, parse_float=_finite)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, float) and value.is_integer() and types.isdisjoint({"number"}):
        value = int(value)
    if isinstance(value, str):
        return text  # with its quotes, since strings are written as bare text
    # for a number's parameter null can only mean none; for a string's parameter it is a word
    fits = not types.isdisjoint(_names(value)) or (value is None and "string" not in types)
    return value if fits else text


def _names(value: object) -> set[str]:
    """JSON schema's names for a value's type."""
    if isinstance(value, int) and not isinstance(value, bool):
        return {"integer", "number"}
    names = {
        bool: "boolean",
        float: "number",
        str: "string",
        list: "array",
        dict: "object",
        type(None): "null",
    }
    return {names[type(value)]}


def _no_json(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    """Converts a number. 1e999 becomes the largest float: JSON has no limit, but every reader has one."""
    most = sys.float_info.max
    return min(max(float(text), -most), most)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
