"""Schemas rewritten with the keywords that grammars support accept the same values."""

import json
import math
import random
import re
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from ipaddress import IPv4Address
from typing import Any
from uuid import UUID

import pytest
from jsonschema import Draft7Validator, Draft202012Validator
from llguidance import LLMatcher

from qwen_serve.server.chat import PromptError
from qwen_serve.server.chat.formats import compose, grammar_format, json_format
from qwen_serve.server.chat.schemas import TEXTS, closed, understood, written_length
from qwen_serve.server.chat.tool_formats import tool_format
from tests.server.chat.test_structural_tags import tokenizer

VALUES: list[Any] = [
    *(None, True, 0, 3.5, "", "a", "ab", "path", [], [1], [1, 1], ["a", 2], {}, {"a": 1}, {"b": "x"}),
    *({"a": "x", "b": 2}, {"ab": 1}, {"b": 1}, {"not": 3, "if": 4}),
]


@pytest.mark.parametrize(
    ("schema", "gone"),
    [
        ({"then": {"type": "null"}}, "then"),
        ({"if": {"type": "null"}}, "if"),
        ({"type": "array", "maxContains": 1}, "maxContains"),
        ({"type": "array", "uniqueItems": False}, "uniqueItems"),
        ({"type": "object", "unevaluatedProperties": True}, "unevaluatedProperties"),
        ({"dependentRequired": {}}, "dependentRequired"),
        ({"type": "string", "format": "path"}, "format"),
        (
            {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
            "propertyNames",
        ),
        ({"type": "object", "propertyNames": {"type": "string", "pattern": "^a"}}, "propertyNames"),
        ({"type": "string", "minLength": 2.0}, "2.0"),
        ({"dependentRequired": {"a": ["b"], "b": []}}, "dependent"),
        ({"allOf": [True], "dependentSchemas": {"a": {"maxProperties": 1}, "b": False}}, "dependent"),
        ({"dependencies": {"a": ["b"], "b": {"required": ["a"]}, "ab": True}}, "dependencies"),
        ({"items": {"items": {"uniqueItems": False}}, "anyOf": [{"then": {}}, {"type": "null"}]}, "then"),
        ({"properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"format": "int64"}}}, "int64"),
    ],
)
def test_what_asks_for_nothing_goes(schema: dict[str, Any], gone: str) -> None:
    found = understood(schema)
    assert gone not in str(found)
    check = Draft7Validator if gone == "dependencies" else Draft202012Validator
    before, after = check(schema), check(found)
    for value in VALUES:
        assert after.is_valid(value) == before.is_valid(value), value


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {}},
        {"if": {}, "then": {"type": "null"}},
        {"uniqueItems": True},
        {"unevaluatedProperties": False},
        {"unevaluatedItems": 1},
        {"contains": {}, "maxContains": 1},
        {"type": "string", "format": "weird"},
        {"propertyNames": {"maxLength": 3}},
        {"propertyNames": {"enum": ["a"]}, "properties": {"b": {}}},
        {"enum": [{"then": 1, "format": "path"}], "default": {"uniqueItems": False}},
        {"properties": {"then": {}, "uniqueItems": {"type": "null"}, "format": {}}},
        {"properties": {"a": False}, "items": True},
    ],
)
def test_what_asks_for_something_stays(schema: dict[str, Any]) -> None:
    assert understood(schema) == schema


@pytest.mark.parametrize(
    ("format_", "read", "good", "bad"),
    [
        (
            "date",
            date.fromisoformat,
            ["1999-12-31", "2000-02-29", "2024-02-29", "1000-01-01"],
            ["2023-02-29", "1900-02-29", "2024-04-31", "2024-13-01", "0000-01-01", "2024-1-1"],
        ),
        (
            "time",
            time.fromisoformat,
            ["00:00:00Z", "23:59:59.123+05:30", "12:00:00-11:00"],
            ["24:00:00Z", "12:60:00Z", "12:00:00", "12:00Z"],
        ),
        (
            "date-time",
            datetime.fromisoformat,
            ["2024-02-29T23:59:59Z"],
            ["2023-02-29T00:00:00Z", "2024-01"],
        ),
        ("uuid", UUID, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000", "x"]),
        ("ipv4", IPv4Address, ["0.0.0.0", "255.249.199.9"], ["256.0.0.0", "1.2.3", "01.2.3.4"]),
    ],
)
def test_formats_as_texts(
    format_: str, read: Callable[[str], object], good: list[str], bad: list[str]
) -> None:
    for text in good:
        assert re.fullmatch(TEXTS[format_], text), text
        read(text)
    for text in bad:
        assert not re.fullmatch(TEXTS[format_], text), text


def test_every_day_of_some_centuries_is_a_date() -> None:
    day = date(1599, 1, 1)
    for _ in range(365 * 500):
        assert re.fullmatch(TEXTS["date"], day.isoformat()), day
        day += timedelta(days=1)


@pytest.mark.parametrize(
    "schema",
    [
        {"format": []},
        {"format": {}},
        {"allOf": 5, "dependencies": {"a": ["b"]}},
        {"allOf": None, "dependentRequired": {"a": ["b"]}},
        {"propertyNames": {"enum": 5}},
        {"propertyNames": {"enum": [[]]}},
        {"propertyNames": {"pattern": []}},
        {"properties": [], "items": 5, "anyOf": {}, "$defs": 1, "dependentSchemas": 3},
    ],
)
def test_what_is_no_schema_is_left_as_it_is(schema: dict[str, Any]) -> None:
    assert understood(schema) == schema


def test_schemas_within_schemas_are_read_once() -> None:
    """Reading them twice at each level would take exponential time."""
    deep: dict[str, Any] = {"type": "null"}
    for _ in range(80):
        deep = {"dependentSchemas": {"a": deep}}
    assert "dependentSchemas" not in str(understood(deep))


def test_the_length_of_what_is_written_many_times() -> None:
    names = [f"n{i}" for i in range(1000)]
    value: Any = {"type": "integer"}
    for _ in range(5):
        value = {"propertyNames": {"enum": names}, "additionalProperties": value}
    assert written_length(understood(value)) > 1000**5
    plains: list[Any] = [{"a": [1, "b", None, {"c": 2**70}], "d": {}}, [], "x"]
    for plain in plains:
        assert 0 < written_length(plain) <= len(json.dumps(plain)) + 2


def test_closed_objects() -> None:
    inner = {"properties": {"properties": {"type": "null"}}}
    found = closed({"properties": {"a": inner, "b": True}, "anyOf": [inner], "enum": [inner]})
    shut = {**inner, "additionalProperties": False}
    assert found == {
        "properties": {"a": shut, "b": True},
        "anyOf": [shut],
        "enum": [inner],
        "additionalProperties": False,
    }
    assert closed({"properties": {}, "additionalProperties": True})["additionalProperties"] is True


BIG = 2**53 + 1


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"const": BIG}, ".const"),
        ({"properties": {"a": {"enum": [1, {"b": [-BIG]}]}}}, ".properties.a.enum[1].b[0]"),
        ({"type": "integer", "minimum": BIG}, ".minimum"),
        ({"type": "integer", "exclusiveMinimum": -BIG}, ".exclusiveMinimum"),
        ({"anyOf": [True, {"items": {"maximum": BIG}}]}, ".anyOf[1].items.maximum"),
        ({"$defs": {"x": {"exclusiveMaximum": BIG}}}, ".$defs.x.exclusiveMaximum"),
        ({"prefixItems": [{"multipleOf": BIG}]}, ".prefixItems[0].multipleOf"),
        ({"dependentSchemas": {"a": {"maximum": BIG}}}, ".dependentSchemas.a.maximum"),
        ({"type": "number", "maximum": 2**63 - 1}, ".maximum"),
        ({"const": 2**70}, ".const"),
        ({"const": 10**400}, ".const"),
        ({"const": 99744906.05767977}, ".const"),
        ({"const": 1315414.6125613619}, ".const"),
    ],
)
def test_numbers_that_llguidance_takes_for_others(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(PromptError, match=r"cannot be told .* use integers") as refusal:
        json_format(schema, "guided_json")
    assert refusal.value.param == f"guided_json{place}"
    with pytest.raises(PromptError, match=re.escape(f"grammar: %json{place}")):
        grammar_format(f"start: %json {json.dumps(schema)}", "grammar")
    parameters = {"type": "object", "properties": {"n": schema}}
    tool: dict[str, Any] = {"function": {"name": "f", "parameters": parameters, "strict": True}}
    with pytest.raises(PromptError) as refusal:
        tool_format([tool], forced=False, parallel=True)
    assert refusal.value.param == f"tools[0].function.parameters.properties.n{place}"
    tool["function"]["strict"] = False
    lark = tool_format([tool], forced=True, parallel=True).lark
    assert "%json" not in lark, "free, since nobody asked for more"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": -(2**53), "maximum": 2**63 - 1},
        {"default": BIG, "examples": [BIG], "properties": {"const": {"title": BIG}}},
        {"enum": [2**53, -(2**53), 2**60, 0.1, 1e22, -0.3, 5e-7, True, None, "9007199254740993"]},
        {"minimum": 0.1, "multipleOf": 0.01, "maximum": "x"},
        {"multipleOf": 400_000_000},
        {"properties": {"a": {"multipleOf": 100_000}, "b": {"multipleOf": 60_000}, "c": {"anyOf": [True]}}},
        {"allOf": [{"multipleOf": 600}, {"multipleOf": 0.25}]},
        {"properties": {"a": {"multipleOf": 100_000}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    ],
)
def test_numbers_that_stay_what_they_are(schema: dict[str, Any]) -> None:
    assert json_format(schema, "guided_json")


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"multipleOf": 10**9}, ".multipleOf"),
        ({"multipleOf": 5e8}, ".multipleOf"),
        ({"allOf": [{"multipleOf": 65_536}, {"multipleOf": 65_537}]}, ".allOf[1].multipleOf"),
        ({"multipleOf": 100_000, "anyOf": [{"multipleOf": 60_000}, {"const": 5}]}, ".multipleOf"),
        ({"allOf": [{"multipleOf": 600}, {"multipleOf": 0.0025}]}, ".allOf[0].multipleOf"),
        (
            {"$defs": {"m": {"multipleOf": 10**5}}, "allOf": [{"$ref": "#/$defs/m"}] * 2},
            ".$defs.m.multipleOf",
        ),
        (
            {"properties": {"a": {"multipleOf": 500}}, "patternProperties": {"^a": {"multipleOf": 333}}},
            ".properties.a.multipleOf",
        ),
        (
            {"multipleOf": 500, "dependentSchemas": {"a": {"multipleOf": 333}}},
            ".dependentSchemas.a.multipleOf",
        ),
    ],
)
def test_multiples_that_llguidance_computes_wrongly(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(PromptError, match=r"without its point|multipleOf") as refusal:
        json_format(schema, "guided_json")
    assert refusal.value.param == f"guided_json{place}"
    assert str(refusal.value).startswith(refusal.value.param)


def test_multiples_are_refused_or_kept() -> None:
    numbers, refused = random.Random(5), 0
    for _ in range(40):
        one, two = (numbers.randint(1, 10 ** numbers.randint(1, 3)) for _ in range(2))
        schema = {"type": "integer", "multipleOf": one, "allOf": [{"multipleOf": two}]}
        try:
            grammar = compose(json_format(schema, "guided_json"), thinking=False)
        except PromptError:
            refused += 1
            continue
        matcher = LLMatcher(tokenizer(), grammar, log_level=0)
        common = math.lcm(one, two)
        for value in (0, common, -7 * common, common + one, common + two, one, two):
            text = str(value).encode()
            fits = matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()
            matcher.reset()
            assert fits == (value % common == 0), (one, two, value)
    assert 0 < refused < 20


def test_constants_are_refused_or_written_as_they_are() -> None:
    numbers = random.Random(3)
    refused = 0
    for _ in range(400):
        digits = numbers.randint(1, 18)
        number: float = round(numbers.uniform(-1, 1) * 10 ** numbers.randint(-6, 15), digits)
        if digits > 12:
            number = numbers.randint(-(10**digits), 10**digits)
        try:
            grammar = compose(json_format({"const": number}, "guided_json"), thinking=False)
        except PromptError:
            refused += 1
            continue
        matcher = LLMatcher(tokenizer(), grammar, log_level=0)
        written = bytes(matcher.compute_ff_tokens()).rstrip(b"\0")
        assert json.loads(written) == number
    assert 0 < refused < 200


def test_the_deepest_value_is_looked_at() -> None:
    deep = "[" * 190 + "9007199254740993" + "]" * 190
    with pytest.raises(PromptError, match="9007199254740993 cannot"):
        json_format(f'{{"const": {deep}}}', "guided_json")


@pytest.mark.parametrize(
    ("schema", "place", "word"),
    [
        ({"type": "string", "max_length": 3}, ".max_length", "maxLength"),
        ({"properties": {"a": {"anyOf": [{"Type": "string"}]}}}, ".properties.a.anyOf[0].Type", "type"),
        ({"name": "x", "schema": {"type": "boolean"}, "strict": True}, ".schema", "the schema in it"),
    ],
)
def test_what_is_no_keyword_but_meant_as_one(schema: dict[str, Any], place: str, word: str) -> None:
    """Anything would fit."""
    with pytest.raises(PromptError) as caught:
        json_format(schema, "guided_json")
    assert caught.value.param == f"guided_json{place}"
    assert word in str(caught.value)


def test_a_strict_tools_parameters_have_the_keywords_spelling() -> None:
    parameters = {"properties": {"p": {"type": "array", "items": {"type": "string"}, "max_items": 3}}}
    function = {"name": "f", "parameters": parameters}
    assert tool_format([{"function": function}], forced=True, parallel=True)
    with pytest.raises(PromptError) as caught:
        tool_format([{"function": {**function, "strict": True}}], forced=True, parallel=True)
    assert caught.value.param == "tools[0].function.parameters.properties.p.max_items"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"max_length": {"type": "integer"}, "Type": {}}, "schema": {}},
        {"type": "string", "x-unit": "m", "example": "a", "propertyOrdering": []},
        {"enum": [{"max_length": 3}], "default": {"Type": 1}},
        {"schema": "a text"},
    ],
)
def test_other_words_are_no_keywords(schema: dict[str, Any]) -> None:
    assert json_format(schema, "guided_json")
