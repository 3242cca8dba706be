"""Parsing of tool calls in tags into JSON arguments."""

import json
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_serve.server.chat.markup import Tags
from qwen_serve.server.chat.scanner import Parser, Scanner
from qwen_serve.server.chat.tool_calls import CallReader, Reading
from qwen_serve.server.chat.tool_schemas import ToolSchemas
from tests.chat_templates.test_templates import template


def read(text: str, tools: list[dict[str, Any]]) -> tuple[str, str | None]:
    """The call's name and the text of its arguments, None where they are cut off; ("", None) for no call."""
    scanner = Scanner()
    scanner.add(text)
    scanner.ended = True
    call = CallReader(scanner, Reading(ToolSchemas(tools), Tags(), drifts=False))
    pieces: list[str] = []

    def whole() -> Parser[tuple[str, str | None]]:
        if not (yield from call.begin()):
            return "", None
        complete = yield from call.arguments(pieces.append)
        return call.name, "".join(pieces) if complete else None

    try:
        next(whole())
    except StopIteration as done:
        found: tuple[str, str | None] = done.value
        return found
    raise AssertionError("it waits for more text than there is")


def typed(text: str, schema: Any, **root: Any) -> Any:
    """The value of a text for a parameter with this schema."""
    parameters = {"type": "object", "properties": {"p": schema}, **root}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    name, arguments = read(f"<function=f><parameter=p>{text}</parameter></function>", tools)
    assert name == "f"
    assert arguments is not None
    return json.loads(arguments)["p"]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, '"quoted"', '"quoted"'),
        ({"type": "integer"}, " 5 ", 5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "integer"}, "five", "five"),
        ({"type": "integer"}, "true", "true"),
        ({"type": "integer"}, "null", None),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "-1.5e3", -1500.0),
        ({"type": "number"}, "1e999", sys.float_info.max),
        ({"type": "object"}, '{"a": [-1e999]}', {"a": [-sys.float_info.max]}),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "array"}, '[1, "a"]', [1, "a"]),
        ({"type": "array"}, "[1,", "[1,"),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        ({"type": "object"}, '{"a": {"b": null}}', {"a": {"b": None}}),
        ({"type": "object"}, "[]", "[]"),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": ["string", "integer"]}, "5 apples", "5 apples"),
        ({"type": ["string", "integer"]}, '"5"', '"5"'),
        ({"anyOf": [{"type": "object"}, {"type": "null"}]}, "{}", {}),
        ({"oneOf": [{"type": "number"}, {"type": "string"}]}, "x", "x"),
        ({"allOf": [{"type": "integer"}]}, "3", 3),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"const": True}, "true", True),
        ({"properties": {"a": {}}}, '{"a": 1}', {"a": 1}),
        ({"items": {"type": "integer"}}, "[1]", [1]),
        ({"type": "string", "items": {}}, "[1]", "[1]"),
        ({}, "5", "5"),
        (True, "5", "5"),
        (None, "5", "5"),
        ({"type": 5, "anyOf": None, "enum": 3}, "5", "5"),
    ],
)
def test_values_get_the_schemas_type(schema: Any, text: str, value: Any) -> None:
    result = typed(text, schema)
    assert result == value
    assert type(result) is type(value)


def test_references() -> None:
    definitions = {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}
    assert typed("5", {"$ref": "#/$defs/n"}, **{"$defs": definitions}) == 5
    assert typed("5", {"$ref": "#/$defs/loop"}, **{"$defs": definitions}) == "5"
    assert typed("5", {"$ref": "#/nowhere"}) == "5"


INTEGER = {"properties": {"p": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("parameters", "value"),
    [
        ({"$ref": "#/$defs/f", "$defs": {"f": INTEGER}}, 5),
        ({"type": "object", "allOf": [INTEGER]}, 5),
        ({"type": "object", "anyOf": [{"properties": {"q": {"type": "string"}}}, INTEGER]}, 5),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, 5),
        ({"properties": {"p": {"type": "string"}}, "additionalProperties": {"type": "integer"}}, "5"),
        ({"type": "object", "additionalProperties": True}, "5"),
    ],
)
def test_parameters_that_stand_deeper(parameters: dict[str, Any], value: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    _, arguments = read("<function=f><parameter=p>5</parameter></function>", tools)
    assert json.loads(arguments or "") == {"p": value}


@pytest.mark.parametrize(
    "tools", [[], [{}], [{"function": None}], [{"function": {"name": "f", "parameters": 1}}]]
)
def test_a_tool_without_a_schema_takes_text(tools: list[dict[str, Any]]) -> None:
    call = "<function=f><parameter=p>5</parameter></function>"
    assert read(call, tools) == ("f", '{"p": "5"}')


@pytest.mark.parametrize(
    ("body", "name", "arguments"),
    [
        ("\n<function=f>\n</function>\n", "f", {}),
        ("<function=f></function>", "f", {}),
        (
            "\n<function=f>\n<parameter=a>\n1\n\n2\n</parameter>\n<parameter=b>x</parameter>\n</function>\n",
            "f",
            {"a": "1\n\n2", "b": "x"},
        ),
        (
            "<function=f><parameter=a>\n</parameter>\n<b></parameter></function>",
            "f",
            {"a": "</parameter>\n<b>"},
        ),
        (
            "<function=f><parameter=a>x</parameter>\n</parameter>\n</parameter></function>",
            "f",
            {"a": "x</parameter>\n</parameter>"},
        ),
        (
            "<function=f><parameter=a>\n<tool_call>\n</tool_call>\n</parameter></function>",
            "f",
            {"a": "<tool_call>\n</tool_call>"},
        ),
        (
            "<function=f><parameter=a>1</parameter><parameter=></parameter></function>",
            "f",
            {"a": "1</parameter><parameter=>"},
        ),
        ("<function=f></function>x", "f", {}),
        ("", "", None),
        ('{"name": "f"}', "", None),
        ("<function=f>", "", None),
        ("<function=>\n</function>", "", None),
        ("<function=f>a</function>", "", None),
        ("<function=f><parameter=a", "", None),
        ("<function=f><parameter=a>1", "f", None),
        ("<function=f><parameter=a>1</function>", "f", None),
        ("<function=f><parameter=a>1</parameter>", "f", None),
    ],
)
def test_blocks(body: str, name: str, arguments: Any) -> None:
    found, text = read(body, [])
    assert (found, None if text is None else json.loads(text)) == (name, arguments)


names = st.text(alphabet="ab_é-.", min_size=1, max_size=6)
values = st.recursive(
    st.text(alphabet='ab é\n"\\<>/=', max_size=10)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.booleans()
    | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=5,
)
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


@settings(max_examples=300)
@given(names, st.dictionaries(names, values, max_size=4))
def test_what_the_template_writes_is_read_back(name: str, arguments: dict[str, Any]) -> None:
    """Rendering a call and parsing it gives the arguments, types and all."""
    properties = {key: {"type": TYPES.get(type(value), "null")} for key, value in arguments.items()}
    tools = [{"function": {"name": name, "parameters": {"properties": properties}}}]
    call = {"function": {"name": name, "arguments": arguments}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    text = template("qwen3_5").render({"messages": messages}, {})
    found, written = read(text.partition(Tags().call)[2].rpartition(Tags().end_call)[0], tools)
    assert found == name
    assert written is not None
    assert json.loads(written) == arguments
