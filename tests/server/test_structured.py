"""Structured output over HTTP, from a model that was not trained for it."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, ConfigDict, Field

from tests.marks import slow_but
from tests.server.serving import served, serving

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "What is 2+2?"}]


@pytest.fixture(scope="module")
def http(nano_f32: Path) -> Iterator[httpx.Client]:
    with served("--model", nano_f32, "--parallel", "8") as client:
        yield client


def test_rules_and_a_format_that_leave_no_token(http: httpx.Client) -> None:
    """What the request brought about is no fault of the server's."""
    [end] = http.post("/tokenize", json={"content": "<|im_end|>", "parse_special": True}).json()["tokens"]
    only: dict[str, Any] = {"messages": ASK, "allowed_token_ids": [end], "enable_thinking": False}
    assert chat(http, **only)["message"]["content"] == ""
    for more in ({"min_tokens": 3}, {"ignore_eos": True}, {"response_format": {"type": "json_object"}}):
        answer = post(http, **only, **more)
        assert answer.status_code == 400, (more, answer.text)
        assert answer.json()["error"]["param"] == "allowed_token_ids"
        assert "leave no token" in answer.json()["error"]["message"]


def post(http: httpx.Client, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
    return http.post(path, json={"max_tokens": 200, **fields})


def chat(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = post(http, **{"messages": ASK, **fields})
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def check(schema: Any, text: str) -> Any:
    value = json.loads(text)
    Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(value)
    return value


FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}


def test_free_text_until_the_models_own_token_for_calls(http: httpx.Client) -> None:
    """What it begins, it completes."""
    begin, end = '<tool_call>\n{"name": "add", "arguments": ', "}\n</tool_call>"
    call = {"begin": begin, "content": {"type": "json_schema", "json_schema": PERSON}, "end": end}
    tags = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [call], "stop_after_first": True}
    [token] = http.post("/tokenize", json={"content": "<tool_call>"}).json()["tokens"]
    fields = {"temperature": 1, "max_tokens": 400, "enable_thinking": False}
    for seed in range(4):
        biased = {"structural_tag": {"format": tags}, "logit_bias": {str(token): 100}}
        found = chat(http, seed=seed, **fields, **biased)
        text = found["message"]["content"]
        if found["finish_reason"] == "stop":
            check(PERSON, text.removeprefix(begin).removesuffix(end))
        assert text.startswith(begin)
    old = {"structures": [{**call, "schema": PERSON}], "triggers": ["<tool_call>"]}
    free = chat(http, **fields, response_format={"type": "structural_tag", **old})
    assert "<tool_call>" not in free["message"]["content"]


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_choice": ["So: </think>, or"]},
        {"guided_regex": "x</think>y"},
        {"grammar": 'root ::= "</think>"'},
        {"guided_json": {"const": "</think>"}},
    ],
)
def test_a_text_that_is_one_token_of_the_model_is_named(http: httpx.Client, fields: dict[str, Any]) -> None:
    answer = post(http, messages=ASK, **fields, enable_thinking=False)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in fields
    assert "has </think>, one token of this model" in answer.json()["error"]["message"]


def test_objects_without_further_properties(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    fields = {"json": schema, "disable_additional_properties": True}
    for seed in range(3):
        found = chat(http, structured_outputs=fields, temperature=1, seed=seed, max_tokens=300)
        if found["finish_reason"] == "stop":
            assert list(json.loads(found["message"]["content"])) == ["a"]


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
                "unit": {"enum": ["C", "F"]},
                "where": {
                    "type": "object",
                    "properties": {"lat": {"type": "number", "maximum": 90, "minimum": -90}},
                    "required": ["lat"],
                    "additionalProperties": False,
                },
                "note": {"anyOf": [{"type": "string", "pattern": "^[a-z]{1,5}$"}, {"type": "null"}]},
                "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
            },
            "required": ["city", "days", "where", "note"],
            "additionalProperties": False,
        },
    },
}
STOP = {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}}
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]


def check_calls(message: dict[str, Any], names: set[str]) -> None:
    assert message["tool_calls"]
    for call in message["tool_calls"]:
        assert call["function"]["name"] in names
        schema = WEATHER if call["function"]["name"] == "get_weather" else STOP
        check(schema["function"]["parameters"], call["function"]["arguments"])  # type: ignore[index]


def test_several_calls(http: httpx.Client) -> None:
    seen = set()
    for seed in range(5):
        fields = {"temperature": 1, "seed": seed, "max_tokens": 900}
        found = chat(http, tools=[WEATHER, STOP], tool_choice="required", **fields)
        if found["finish_reason"] == "tool_calls":
            check_calls(found["message"], {"get_weather", "stop"})
            seen.add(len(found["message"]["tool_calls"]))
    assert seen


@pytest.mark.parametrize("tools", [[WEATHER], [WEATHER, STOP]])
def test_a_forced_call_that_is_cut_off_is_no_content(http: httpx.Client, tools: list[Any]) -> None:
    """A client that asked for this tool finds its call, whose arguments are incomplete."""
    choice = {"type": "function", "function": {"name": "get_weather"}}
    fields = {"tools": tools, "tool_choice": choice, "enable_thinking": False}
    for limit in range(1, 16):
        found = chat(http, **fields, max_tokens=limit)
        [call] = found["message"]["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
            json.loads(call["function"]["arguments"])
        assert (found["message"]["content"], found["finish_reason"]) == (None, "length")


@pytest.mark.parametrize(
    ("parameters", "may"),
    [
        ({"type": "object", "anyOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}]}, True),
        ({"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}}]}, True),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, True),
        ({"type": "object"}, False),
        ({"type": "object", "properties": {}}, False),
    ],
)
def test_a_forced_call_may_have_parameters_that_are_described_elsewhere(
    http: httpx.Client, parameters: dict[str, Any], may: bool
) -> None:
    """It had none, whatever the model would have written."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    fields = {"tools": [tool], "tool_choice": "required", "temperature": 1, "max_tokens": 300}
    arguments = set()
    for seed in range(8):
        found = chat(http, **fields, seed=seed, enable_thinking=False)
        arguments |= {call["function"]["arguments"] for call in found["message"]["tool_calls"]}
    assert (arguments != {"{}"}) == may


def test_strict_tools_leave_the_choice_and_bind_the_arguments(http: httpx.Client) -> None:
    for seed in range(4):
        found = chat(http, tools=[STRICT], temperature=1, seed=seed, max_tokens=300)
        if found["message"].get("tool_calls"):
            check_calls(found["message"], {"get_weather"})
        assert "<tool_call>" not in (found["message"]["content"] or "")


def test_formats_in_the_words_of_other_protocols(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    format_ = {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}
    for field in ({"output_format": format_}, {"output_config": {"format": format_}}):
        [block] = post(http, "/v1/messages", messages=ASK, **field).json()["content"]
        assert set(json.loads(block["text"])) == {"a"}
    tools = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("go", "stop")]
    chosen = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "stop"}]}
    body = {"input": "What is 2+2?", "tools": tools, "tool_choice": chosen, "max_output_tokens": 99}
    found = http.post("/v1/responses", json=body).json()["output"]
    assert {item["name"] for item in found if item["type"] == "function_call"} == {"stop"}


def test_what_pydantic_writes_can_be_enforced(http: httpx.Client) -> None:
    """Types that people use: a discriminated union, a date, a path, a dictionary by literal names."""

    class Closed(BaseModel):
        model_config = ConfigDict(extra="forbid")

    class Cat(Closed):
        kind: Literal["cat"]

    class Dog(Closed):
        kind: Literal["dog"]
        born: date

    class Home(Closed):
        pet: Annotated[Cat | Dog, Field(discriminator="kind")]
        since: date
        folder: Annotated[str, Field(max_length=9, json_schema_extra={"format": "path"})]
        rooms: dict[Literal["kitchen", "bath"], Annotated[int, Field(ge=0, le=9)]]

    schema = Home.model_json_schema()
    tool = {"name": "add", "strict": True, "parameters": schema}
    for seed in range(3):
        fields = {"temperature": 1, "seed": seed, "max_tokens": 600, "enable_thinking": False}
        found = chat(http, json_schema=schema, **fields)
        Home.model_validate_json(found["message"]["content"])
        called = chat(http, tools=[{"type": "function", "function": tool}], tool_choice="required", **fields)
        for call in called["message"]["tool_calls"]:
            Home.model_validate_json(call["function"]["arguments"])


def test_a_schema_or_a_call(http: httpx.Client) -> None:
    for seed in range(3):
        fields = {"temperature": 1, "seed": seed, "max_tokens": 600}
        found = chat(http, tools=[STRICT, STOP], guided_json=PERSON, **fields)
        if found["message"].get("tool_calls"):
            assert found["message"]["content"] is None
        else:
            check(PERSON, found["message"]["content"])


CHAIN = "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(5000)) + 'a5000: "x"'
REFERENCES = {
    "$ref": "#/$defs/a0",
    "$defs": {
        **{f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(5000)},
        "a5000": {"type": "null"},
    },
}
"""Either would end the process, for want of stack."""


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
        ({"guided_json": {"type": "string", "format": "weird"}}, "guided_json", "weird"),
        ({"guided_json": "{"}, "guided_json", "JSON"),
        ({"guided_json": False}, "guided_json", "not"),
        ({"guided_json": {"x-guidance": {"lenient": True}, "not": {}}}, "guided_json", "not"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look"),
        ({"guided_choice": [""]}, "guided_choice", "empty"),
        ({"grammar": "start: missing\n"}, "grammar", "missing"),
        ({"guided_grammar": ""}, "guided_grammar", "root"),
        ({"grammar": "root ::= other"}, "grammar", "other"),
        ({"grammar": 'root ::= "a"{²}'}, "grammar", "²"),
        ({"grammar": 'root ::= "a"\n' + 'r ::= "b"\n' * 1000}, "grammar", "1,000 rules"),
        ({"grammar": "\n" * 1_000_000}, "grammar", "65,536 characters"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "JSON"),
        ({"structural_tag": {"format": {"type": "token"}}}, "structural_tag.format.type", "token"),
        ({"grammar": CHAIN}, "grammar", "too complex"),
        ({"guided_json": REFERENCES}, "guided_json", "too complex"),
        ({"guided_regex": "((a{1000}){1000}){1000}", "temperature": 1}, "guided_regex", "too"),
        ({"grammar": 'root ::= "a"{1000000000}', "temperature": 1}, "grammar", "too complex"),
        (
            {"tools": [STRICT], "structural_tag": {"format": {"type": "any_text"}}},
            "structural_tag",
            "contradict",
        ),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "one of"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "contradict"),
        ({"guided_whitespace_pattern": "x"}, "guided_whitespace_pattern", "guided_json"),
        ({"guided_json": {}, "ignore_eos": True}, "ignore_eos", "guided_json"),
        ({"tool_choice": "sometimes"}, "tool_choice", "required"),
        (
            {"tools": [STOP], "tool_choice": {"type": "function", "function": {"name": "go"}}},
            "tool_choice",
            "go",
        ),
        ({"tools": [STRICT], "guided_regex": "a"}, "guided_regex", "contradict"),
    ],
)
def test_what_cannot_be_enforced_is_refused(
    http: httpx.Client, fields: dict[str, Any], param: str, word: str
) -> None:
    answer = post(http, messages=ASK, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert word in error["message"]
    assert chat(http, guided_choice=["yes"])["message"]["content"] == "yes"  # nobody else suffers


YES = 'root ::= "yes"'


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_grammar": YES, "structured_outputs": {"grammar": YES}},  # guidance's VLLMModel
        {"guided_choice": ["yes"], "structured_outputs": {"choice": ["yes"]}},
        {"guided_regex": "yes", "regex": "yes", "structured_outputs": {"regex": "yes"}},
    ],
)
def test_what_two_fields_say_alike_is_said_once(http: httpx.Client, fields: dict[str, Any]) -> None:
    assert chat(http, **fields)["message"]["content"] == "yes"


def test_a_schema_in_the_words_of_several_servers(http: httpx.Client) -> None:
    fields = {
        "guided_json": json.dumps(PERSON),
        "structured_outputs": {"json": PERSON},
        "response_format": FORMAT,
    }
    check(PERSON, chat(http, **fields)["message"]["content"])
    refused = post(http, messages=ASK, **fields, json_schema={"type": "object"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "json_schema"
    spaced = post(http, messages=ASK, **fields, guided_whitespace_pattern=" ")
    assert spaced.status_code == 400
    assert "contradict" in spaced.json()["error"]["message"]


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ({"type": "string", "format": "email"}, "format"),
        ({"type": "string", "contentEncoding": "base64", "not": {}}, "not"),
        ({"allOf": [{"type": "string"}, {"minLength": 3}]}, "allOf"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "oneOf"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"const": 2**53 + 1}, "tools[0].function.parameters.properties.x.const"),
    ],
)
def test_a_strict_tool_that_cannot_be_enforced_is_refused(
    http: httpx.Client, value: dict[str, Any], word: str
) -> None:
    tool = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"x": value}}}
    answer = post(http, messages=ASK, tools=[{"type": "function", "function": tool}])
    assert answer.status_code == 400, answer.text
    assert word in answer.json()["error"]["message"]
    tool["strict"] = False
    fields: dict[str, Any] = {"tool_choice": "required", "temperature": 1, "max_tokens": 100}
    answer = post(http, messages=ASK, tools=[{"type": "function", "function": tool}], **fields)
    assert answer.status_code == 200, answer.text


UNENFORCED: dict[str, dict[str, Any]] = {
    "look-ahead": {"type": "string", "pattern": "^(?!x).*$"},
    "back-reference": {"type": "string", "pattern": r"(a)\1"},
    "no regex": {"type": "string", "pattern": "["},
    "uniqueItems": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "not": {"type": "integer", "not": {"const": 1}},
    "if": {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "propertyNames": {"type": "object", "properties": {"a": {}}, "propertyNames": {"pattern": "^a"}},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "type": {"type": "any"},
    "types": {"type": ["integer", "whatever"]},
    "inside": {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}},
}


def test_a_schema_that_cannot_be_enforced_frees_its_parameter_alone(http: httpx.Client) -> None:
    """The other parameters and tools keep theirs, and a strict tool is refused by name."""
    color = {"type": "string", "enum": ["red", "green"]}
    parameters = {
        "type": "object",
        "properties": {"color": color, **UNENFORCED},
        "required": ["color"],
        "additionalProperties": False,
    }
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": parameters}},
        {"type": "function", "function": {"name": "g", "parameters": {"properties": {"color": color}}}},
    ]
    named = {"type": "function", "function": {"name": "f"}}
    for seed in range(3):
        found = chat(http, tools=tools, tool_choice=named, temperature=1, seed=seed, max_tokens=60)
        [call] = found["message"]["tool_calls"]
        assert call["function"]["name"] == "f"
        assert re.match(r'\{"color": "(red|green)"', call["function"]["arguments"])
    for name, schema in UNENFORCED.items():
        one = {**parameters, "properties": {"color": color, name: schema}}
        tool: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": one}}
        assert post(http, messages=ASK, tools=[tool, tools[1]], tool_choice="any", max_tokens=9).is_success
        tool["function"]["strict"] = True
        refused = post(http, messages=ASK, tools=[tool, tools[1]], max_tokens=9)
        assert refused.status_code == 400, name
        assert f"tools[0].function.parameters.properties.{name}" in refused.json()["error"]["param"], name


@pytest.mark.parametrize("sampling", slow_but(["device"], ["host", "device"]))
def test_documents_at_temperature_1_are_all_valid(nano_f32: Path, sampling: str) -> None:
    """Side by side with free answers; whoever is cut off by its limit does not count."""

    def one(http: httpx.Client, seed: int) -> bool:
        fields: dict[str, Any] = {"temperature": 1, "seed": seed, "top_k": seed % 3 * 20}
        if seed % 8 == 0:
            chat(http, max_tokens=30, **fields)
            return False
        found = chat(http, guided_json=PERSON, **fields)
        if found["finish_reason"] == "length":
            return False
        check(PERSON, found["message"]["content"])
        return True

    with (
        serving(nano_f32, parallel=8, sampling=sampling) as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
        ThreadPoolExecutor(8) as pool,
    ):
        assert sum(pool.map(partial(one, http), range(24))) > 16
