"""Qwen3.5's tool calls as text, back to a name and JSON arguments.

    <tool_call>
    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>

Values are bare text: their types come from the tool's JSON schema.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

OPEN = "<tool_call>"
CLOSE = "</tool_call>"

_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>")
# A value may itself contain `</parameter>`: it ends where the next parameter or the function's end follows.
_PARAMETER = re.compile(
    r"\s*<parameter=([^<>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=|</function>))", re.DOTALL
)
_OPEN_PARAMETER = re.compile(r"\s*<parameter=[^<>\n]+>")
_SURROGATE = re.compile("[\ud800-\udfff]")
_END = re.compile(r"\s*</function>\s*\Z")


@dataclass(frozen=True)
class Call:
    """A call as written: parameter values are still text."""

    name: str
    parameters: dict[str, str]


class Broken(Enum):
    """Why a block is no call."""

    MALFORMED = "malformed"
    OPEN_VALUE = "a parameter's value is not closed yet"


def could_open(body: str) -> bool:
    """Whether text behind `<tool_call>` can still become a call."""
    start = body[: len(body) - len(body.lstrip()) + len("<function=")].lstrip()
    return "<function=".startswith(start)


def parse_call(body: str) -> Call | Broken:
    """Read what stands between `<tool_call>` and a `</tool_call>`."""
    function = _FUNCTION.match(body)
    if function is None:
        return Broken.MALFORMED
    parameters = {}
    position = function.end()
    while parameter := _PARAMETER.match(body, position):
        parameters[parameter[1].strip()] = parameter[2].removeprefix("\n").removesuffix("\n")
        position = parameter.end()
    if _END.match(body, position):
        return Call(function[1].strip(), parameters)
    return Broken.OPEN_VALUE if _OPEN_PARAMETER.match(body, position) else Broken.MALFORMED


class ToolSchemas:
    """The parameter schemas of a request's tools (OpenAI's objects), to give call arguments their types."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        functions = [_dict(tool.get("function")) for tool in tools]
        self._schemas = {function.get("name"): _dict(function.get("parameters")) for function in functions}

    def arguments(self, call: Call) -> str:
        """The call's arguments as a JSON object; text that has no schema or does not fit it is a string."""
        schema = self._schemas.get(call.name, {})
        properties = _dict(schema.get("properties"))
        typed = {
            key: _typed(text, _types(properties.get(key), schema)) for key, text in call.parameters.items()
        }
        # half a surrogate pair, which has no UTF-8, stays the escape that it was written as
        return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(typed, ensure_ascii=False))


def _types(schema: object, root: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema allows; empty when it does not say. Every part of it is read once."""
    types: set[str] = set()
    seen: set[int] = set()  # `$ref` can go in circles
    unread = [schema]
    while unread:
        part = unread.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        declared = part.get("type")
        names = {name for name in [declared, *_list(declared)] if isinstance(name, str)}
        if not names:
            options = [part["const"]] if "const" in part else _list(part.get("enum"))
            names = {name for option in options for name in _names(option)}
        types |= names
        unread += (option for key in ("anyOf", "oneOf", "allOf") for option in _list(part.get(key)))
        if "$ref" in part:
            unread.append(resolve(part["$ref"], root))
    return types


def resolve(reference: object, root: Mapping[str, Any]) -> object:
    """Follow a reference inside the same schema, `#/$defs/name`; None when it leads nowhere."""
    found: object = root
    for key in str(reference).removeprefix("#/").split("/"):
        found = _dict(found).get(key.replace("~1", "/").replace("~0", "~"))
    return found


def _typed(text: str, types: set[str]) -> Any:
    """The value that `text` writes, when it is of one of `types`; otherwise the text itself."""
    if not types or types == {"string"}:
        return text
    word = text.strip()
    # Python's spellings too: the template writes a history's scalars that way.
    word = {"True": "true", "False": "false", "None": "null"}.get(word, word)
    try:
        value = json.loads(word, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, float) and value.is_integer() and types.isdisjoint({"number"}):
        value = int(value)
    if isinstance(value, str):
        return text  # quotes and all: only bare text is how a string is written
    # null for a parameter that needs, say, a number can only mean none; for a string it is a word.
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


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not JSON")
    return value


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
