"""Rewrites JSON schemas for llguidance: removes what has no effect, and converts what has an equivalent
form."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, NoReturn

from pydantic_core import from_json

from .errors import PromptError

ANNOTATIONS = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "nullable"),
    *("$comment", "$schema", "$id", "$anchor", "$defs", "definitions", "x-guidance", "discriminator"),
    *("contentMediaType", "contentEncoding", "contentSchema"),
}
"""Keywords without effect."""

FREE_FORMATS = {
    *("int32", "int64", "float", "double", "byte", "binary", "password"),
    *("path", "file-path", "directory-path", "json-string", "base64", "base64url"),
    *("ipv4network", "ipv6network", "ipv4interface", "ipv6interface", "ipvanyaddress"),
}
"""Formats of OpenAPI and pydantic that JSON Schema does not define, so they have no effect."""

_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
TEXTS = {
    "date": r"([1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    r"|02-(0[1-9]|1[0-9]|2[0-8]))"
    r"|([1-9][0-9](0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26])00)-02-29)",
    "time": r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"({_OCTET}\.){{3}}{_OCTET}",
}
"""Formats as regular expressions, for text outside JSON."""
TEXTS["date-time"] = f"{TEXTS['date']}T{TEXTS['time']}"

_ONE = {"additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames"}
_ONE |= {"unevaluatedProperties", "unevaluatedItems", "items"}
_MANY = {"allOf", "anyOf", "oneOf", "prefixItems", "items"}
_NAMED = {"properties", "patternProperties", "$defs", "definitions"}
_COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "enum"}
_DEPENDENT = {"dependentSchemas", "dependencies"}
_COMBINING = {"allOf", "anyOf", "oneOf", "$ref", "patternProperties"}
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
"""Keywords that have no effect with these values, or without the keyword that they belong to."""

_ENFORCED = {
    *("type", "enum", "const", "required", "pattern", "format", "items", "prefixItems", "additionalItems"),
    *("properties", "patternProperties", "additionalProperties", "propertyNames", "contains", "uniqueItems"),
    *("allOf", "anyOf", "oneOf", "not", "$ref", "dependentRequired", "dependentSchemas"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
}
_MEANT = {keyword.lower(): keyword for keyword in _ENFORCED}
"""Keywords that restrict a value, by their letters."""

_OWNERS = {"minContains": ("contains",), "maxContains": ("contains",), "then": ("if",), "else": ("if",)}


JSON_SCHEMA = re.compile(r"%json\s*(?=\{)")
"""Introduces a schema in llguidance's Lark."""

INT64_MAX = 2**63 - 1
"""The largest integer `maximum` that llguidance supports. Many programs write it for "no limit"."""

MAX_MULTIPLE = (2**32 - 10) // 10 + 1
"""Largest `multipleOf` in units of its last digit, since llguidance computes remainder times ten plus a digit
in 32 bits."""

MAX_COMMON_MULTIPLE = 2**16 - 1
"""Largest `multipleOf` if a value has several, since llguidance multiplies two of them (numeric.rs,
`Decimal::lcm`)."""

_Place = tuple[Any, str] | None
"""A place in a schema: the enclosing place, and the step from there, as in `.properties` or `[0]`."""


def json_value(text: str, param: str) -> Any:
    """The value of a JSON text, within the limits of request bodies. Raises PromptError."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise PromptError(param, f"is not valid JSON: {error}") from None


def understood(schema: Any) -> Any:
    """An equivalent schema that llguidance understands. An invalid one is returned unchanged, and llguidance
    reports the error.

    Parts of the result may be the same object, so its JSON may be longer than that of `schema`
    (`written_length`).
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
    """Rewrites dependencies between properties: either the property is absent, or its dependencies hold."""
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
    """Rewrites `propertyNames`, an enumeration or a pattern, as properties."""
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
    """The schema without additional properties in its objects, unless it allows them explicitly."""
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


def check_keywords(schema: Mapping[str, Any], where: str) -> None:
    """Raises PromptError for a keyword in another spelling (`max_length`), and for a schema inside another
    object. JSON Schema ignores both, so anything would fit."""
    if isinstance(schema.get("schema"), Mapping) and schema.keys().isdisjoint(_ENFORCED):
        raise PromptError(f"{where}.schema", "no keyword of JSON Schema; send the schema in it")
    for place, one in _schemas(schema):
        for key in one.keys() - _ENFORCED:
            keyword = _MEANT.get(key.replace("_", "").replace("-", "").lower())
            if keyword is not None:
                path = _path(where, (place, f".{key}"))
                raise PromptError(path, f"no keyword of JSON Schema; {keyword} is one")


def check_numbers(schema: Any, where: str) -> None:
    """Raises PromptError for a number that llguidance would misread, and for multiples that it would compute
    wrongly; `where` is the schema's path in the request."""
    multiples: list[tuple[_Place, int | float]] = []
    combined, references = False, 0
    for place, one in _schemas(schema):
        for key in one.keys() & _NUMBERS:
            no_bound = key == "maximum" and one.get("type") == "integer" and one[key] == INT64_MAX
            found = None if no_bound else _misread((place, f".{key}"), one[key])
            if found is not None:
                wrong = "cannot be told from the numbers next to it; use integers from -2^53 to 2^53"
                _refuse_number(where, *found, f"{wrong}, fractions of at most 15 digits, or a string")
        multiple = one.get("multipleOf")
        if isinstance(multiple, int | float) and multiple > 0:
            multiples.append(((place, ".multipleOf"), multiple))
        references += "$ref" in one
        combined = combined or _is_combined(one)
    _check_multiples(multiples, where, combined=combined and (len(multiples) > 1 or references > 1))


def _path(where: str, place: _Place) -> str:
    steps: list[str] = []
    while place is not None:
        place, step = place
        steps.append(step)
    return where + "".join(reversed(steps))


def _refuse_number(where: str, place: _Place, number: float, wrong: str) -> NoReturn:
    where = _path(where, place)
    raise PromptError(where, f"{str(number)[:40]} {wrong}")


def check_lark_numbers(text: str, where: str) -> None:
    """`check_numbers` for the schemas in a grammar."""
    for found in JSON_SCHEMA.finditer(text):
        try:
            schema, _ = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError):  # llguidance reports the error
            continue
        check_numbers(schema, f"{where}: %json")


def _schemas(schema: Any) -> Iterator[tuple[_Place, Mapping[str, Any]]]:
    """The schema and all inside it."""
    todo: list[tuple[_Place, Any]] = [(None, schema)]
    while todo:
        place, one = todo.pop()
        if not isinstance(one, Mapping):
            continue
        yield place, one
        for key, value in one.items():
            within = (place, f".{key}")
            if key in _NAMED | _DEPENDENT and isinstance(value, Mapping):
                todo += [((within, f".{name}"), inner) for name, inner in value.items()]
            elif key in _MANY and isinstance(value, list):
                todo += [((within, f"[{index}]"), inner) for index, inner in enumerate(value)]
            elif key in _ONE:
                todo.append((within, value))


def _misread(place: _Place, value: Any) -> tuple[_Place, int | float] | None:
    """A number that llguidance would misread, and its place."""
    todo = [(place, value)]
    while todo:
        place, value = todo.pop()
        if isinstance(value, Mapping):
            todo += [((place, f".{key}"), one) for key, one in value.items()]
        elif isinstance(value, list):
            todo += [((place, f"[{index}]"), one) for index, one in enumerate(value)]
        elif isinstance(value, int | float) and not _is_read_right(value):
            return place, value
    return None


def _is_combined(schema: Mapping[str, Any]) -> bool:
    """Whether a value must fit several schemas, which llguidance merges."""
    asks = schema.keys() - ANNOTATIONS - {"type"}
    several = len(asks) > 1 or (isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1)
    return not asks.isdisjoint(_DEPENDENT) or (several and not asks.isdisjoint(_COMBINING))


def _check_multiples(multiples: list[tuple[_Place, int | float]], where: str, *, combined: bool) -> None:
    exact = [Decimal(repr(multiple)).normalize() for _, multiple in multiples]
    digits = [max(0, len(one.as_tuple().digits) - 1 - one.adjusted()) for one in exact]
    common = 1
    for (place, multiple), one, own in zip(multiples, exact, digits, strict=True):
        if one.scaleb(own) > MAX_MULTIPLE:
            wrong = f"has too many digits; without its point a multiple may be {MAX_MULTIPLE:,}"
            _refuse_number(where, place, multiple, wrong)
        if not combined:
            continue
        common = math.lcm(common, int(one.scaleb(max(digits))))
        if common > MAX_COMMON_MULTIPLE:
            wrong = (
                "may meet another multipleOf where schemas are combined, and their least common multiple is,"
                f" without its point, above {MAX_COMMON_MULTIPLE:,}; say it in one schema"
            )
            _refuse_number(where, place, multiple, wrong)


def _is_read_right(number: float) -> bool:
    """Whether llguidance reads a number exactly. It uses floats only, and serde_json converts a fraction in
    two steps (`f64_from_parts`), each of which may round."""
    if isinstance(number, int):
        return abs(number) <= INT64_MAX and float(number) == number
    _, digits, exponent = Decimal(repr(abs(number))).as_tuple()
    assert isinstance(exponent, int)
    if abs(exponent) > 308:
        return False
    whole, power = float(int("".join(map(str, digits)))), float(f"1e{abs(exponent)}")
    return (whole * power if exponent > 0 else whole / power) == abs(number)


def written_length(value: Any) -> int:
    """A lower bound for the length of the value's JSON, in characters. Each object is visited once, however
    often it occurs."""
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
