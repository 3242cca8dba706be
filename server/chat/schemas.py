"""JSON schemas in the words that llguidance enforces: what asks for nothing is left out, what can be said
otherwise is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ANNOTATIONS = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "nullable"),
    *("$comment", "$schema", "$id", "$anchor", "$defs", "definitions", "x-guidance", "discriminator"),
    *("contentMediaType", "contentEncoding", "contentSchema"),
}
"""Keywords that ask for nothing."""

FREE_FORMATS = {
    *("int32", "int64", "float", "double", "byte", "binary", "password"),
    *("path", "file-path", "directory-path", "json-string", "base64", "base64url"),
    *("ipv4network", "ipv6network", "ipv4interface", "ipv6interface", "ipvanyaddress"),
}
"""OpenAPI's and pydantic's, which JSON Schema does not define: it says that they ask for nothing."""

_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
TEXTS = {
    "date": r"([1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    r"|02-(0[1-9]|1[0-9]|2[0-8]))"
    r"|([1-9][0-9](0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26])00)-02-29)",
    "time": r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"({_OCTET}\.){{3}}{_OCTET}",
}
"""Formats as regular expressions, for texts that stand in no JSON."""
TEXTS["date-time"] = f"{TEXTS['date']}T{TEXTS['time']}"

_ONE = {"additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames"}
_ONE |= {"unevaluatedProperties", "unevaluatedItems", "items"}
_MANY = {"allOf", "anyOf", "oneOf", "prefixItems", "items"}
_NAMED = {"properties", "patternProperties", "$defs", "definitions"}
_COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedProperties": (True,),
    "unevaluatedItems": (True,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "minContains": (),
    "maxContains": (),
    "then": (),
    "else": (),
}
"""Keywords that ask for nothing with these values, or without the one that they belong to."""

_OWNERS = {"minContains": ("contains",), "maxContains": ("contains",), "then": ("if",), "else": ("if",)}


def understood(schema: Any) -> Any:
    """A schema that the same values fit. What is no schema stays as it is, for llguidance to complain of.

    Parts of it may be the same object: written out it may be longer than it was (`written_length`).
    """
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if _asks_for_nothing(key, value, schema):
            continue
        if key in _NAMED and isinstance(value, Mapping):
            found[key] = {name: understood(one) for name, one in value.items()}
        elif key in _MANY and isinstance(value, list):
            found[key] = [understood(one) for one in value]
        elif key in _ONE:
            found[key] = understood(value)
        elif key in _COUNTS and isinstance(value, float) and value.is_integer():
            found[key] = int(value)
        else:
            found[key] = value
    return _named(_depending(found))


def _asks_for_nothing(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    if key == "format":
        return isinstance(value, str) and value in FREE_FORMATS
    if key == "if":
        return "then" not in schema and "else" not in schema
    if not all(owner in schema for owner in _OWNERS.get(key, ())):
        return True
    return any(value is one or (value == one and type(value) is type(one)) for one in _HARMLESS.get(key, ()))


def _depending(schema: dict[str, Any]) -> dict[str, Any]:
    """What a property asks of the others where it is there: it is not, or they are so."""
    asked: list[Any] = []
    rest = dict(schema)
    if not isinstance(rest.get("allOf", []), list):
        return schema
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        dependents = rest.get(key)
        if isinstance(dependents, Mapping):
            del rest[key]
            for name, wanted in dependents.items():
                wanted = {"required": wanted} if isinstance(wanted, list) else understood(wanted)
                asked.append({"anyOf": [{"properties": {name: False}}, wanted]})
    return {**rest, "allOf": [*rest.get("allOf", []), *asked]} if asked else schema


def _named(schema: dict[str, Any]) -> dict[str, Any]:
    """Names of properties that are an enumeration, or follow a pattern, as properties."""
    names = schema.get("propertyNames")
    others = {"properties", "patternProperties"}
    if not isinstance(names, Mapping) or schema.keys() & others:
        return schema
    asked = {key for key in names if key not in ANNOTATIONS and (key, names[key]) != ("type", "string")}
    value = schema.get("additionalProperties", True)
    listed = names.get("enum")
    if asked == {"enum"} and isinstance(listed, list) and all(isinstance(name, str) for name in listed):
        more: dict[str, Any] = {"properties": dict.fromkeys(listed, value)}
    elif asked == {"pattern"} and isinstance(names["pattern"], str):
        more = {"patternProperties": {names["pattern"]: value}}
    else:
        return schema
    rest = {key: one for key, one in schema.items() if key != "propertyNames"}
    return {**rest, **more, "additionalProperties": False}


def closed(schema: Any) -> Any:
    """A schema whose objects have no properties but those that it names, where it does not say otherwise."""
    if not isinstance(schema, Mapping):
        return schema
    found = {key: _closed_part(key, one) for key, one in schema.items()}
    if isinstance(schema.get("properties"), Mapping):
        found.setdefault("additionalProperties", False)
    return found


def _closed_part(key: str, value: Any) -> Any:
    if key in _NAMED | {"dependentSchemas"} and isinstance(value, Mapping):
        return {name: closed(one) for name, one in value.items()}
    if key in _MANY and isinstance(value, list):
        return [closed(one) for one in value]
    return closed(value) if key in _ONE else value


def written_length(value: Any) -> int:
    """Characters that JSON is at least as long as. An object is looked at once, however often it is there."""
    return _length(value, {})


def _length(value: Any, known: dict[int, int]) -> int:
    if isinstance(value, str):
        return len(value) + 2
    if isinstance(value, int):
        return 1 + value.bit_length() // 4
    if not isinstance(value, Mapping | list):
        return 1
    length = known.get(id(value))
    if length is None:
        if isinstance(value, Mapping):
            length = sum(len(key) + 4 + _length(one, known) for key, one in value.items())
        else:
            length = sum(1 + _length(one, known) for one in value)
        known[id(value)] = length = length + 2
    return length
