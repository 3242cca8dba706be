"""The schemas of a request's tools: which parameters a tool declares, and of which types."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .values import type_names

_IMPLIED = {
    "properties": "object",
    "additionalProperties": "object",
    "items": "array",
    "prefixItems": "array",
}
"""Keyword -> the type that a schema without a `type` means by it."""


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

    def declares(self, name: str, parameter: str) -> bool:
        """Whether a tool's schema names the parameter."""
        schema = self._schemas.get(name, {})
        return any(parameter in _dict(part.get("properties")) for part in _parts(schema, schema))

    def required(self, name: str) -> set[str]:
        """The parameters that every call of the tool has."""
        schema = self._schemas.get(name, {})
        top = followed(schema, schema) or {}
        return {one for one in _list(top.get("required")) if isinstance(one, str)}


def _types(schema: object, root: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema allows; empty if it does not say."""
    types: set[str] = set()
    for part in _parts(schema, root):
        declared = part.get("type")
        names = {name for name in [declared, *_list(declared)] if isinstance(name, str)}
        if not names:
            options = [part["const"]] if "const" in part else _list(part.get("enum"))
            names = {name for option in options for name in type_names(option)}
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


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
