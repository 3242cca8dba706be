"""Generated bodies: every answer is a success or a 4xx with an error object, and the server keeps running."""

import json
import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_serve.server.api.fields.unsupported import UNSUPPORTED
from qwen_serve.server.api.formats.chat import ChatRequest
from qwen_serve.server.api.formats.completions import CompletionRequest
from qwen_serve.server.chat.structural_tags import KEYS as STRUCTURAL
from tests.server.api.conftest import Server, Start
from tests.server.api.formats.wires import FORMATS, ask, results_of
from tests.server.api.test_bad_input import error_of

text = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(
    ["<think>", "<|im_end|>", "</tool_call>"]
)
scalar = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text
anything = st.recursive(
    scalar, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3)
)

rules = st.text(st.sampled_from('ab0 \n\t:=|()[]{}*+?~&/."\\<>@%#,-^$²é\0'), max_size=24)
pieces = st.lists(
    st.sampled_from(
        [
            *("root ::= ", "start: ", "A: ", '"a"', "[a-z]", "/a+/", "%json {}", "%ignore", "@answer", "\n"),
            *(
                "{1,2}",
                "{9999999999}",
                "<tool_call>",
                "<[1-9]>",
                "%llguidance {}",
                "x[lazy]: ",
                "(",
                ")",
                "*",
            ),
        ]
    ),
    max_size=8,
).map(" ".join)
grammar = rules | pieces | rules.map("root ::= {}".format) | rules.map("start: {}".format)
"""Texts in the alphabets of GBNF, Lark and regular expressions."""

keywords = st.sampled_from(
    [
        *("type", "enum", "const", "format", "pattern", "minLength", "maxItems", "multipleOf", "maximum"),
        *("properties", "required", "items", "prefixItems", "additionalProperties", "patternProperties"),
        *(
            "propertyNames",
            "anyOf",
            "oneOf",
            "allOf",
            "not",
            "if",
            "then",
            "dependentSchemas",
            "dependencies",
        ),
        *("dependentRequired", "$ref", "$defs", "uniqueItems", "contains", "minContains"),
    ]
)
types = st.sampled_from(
    ["object", "array", "string", "integer", "number", "boolean", "null", "#", "#/$defs/a"]
)
schema = st.recursive(
    anything | types | st.just({}),
    lambda inner: st.dictionaries(keywords, inner, max_size=3) | st.lists(inner, max_size=2),
    max_leaves=12,
)
kinds = st.sampled_from([*STRUCTURAL, "token"])
keys = st.sampled_from(sorted(set().union(*STRUCTURAL.values())))
tag = st.recursive(
    text | st.none() | st.fixed_dictionaries({"type": kinds, "value": text, "pattern": rules}),
    lambda inner: (
        st.builds(lambda kind, rest: {"type": kind, **rest}, kinds, st.dictionaries(keys, inner, max_size=4))
        | st.lists(inner, max_size=2)
    ),
    max_leaves=10,
)
structural_tag = st.fixed_dictionaries({"format": tag}) | st.fixed_dictionaries(
    {
        "structures": st.lists(
            st.fixed_dictionaries({"begin": text, "schema": schema, "end": text}), max_size=2
        )
    },
    optional={"triggers": st.lists(text, max_size=2)},
)
structured = st.one_of(
    st.fixed_dictionaries({"grammar": grammar}),
    st.fixed_dictionaries({"guided_grammar": grammar}),
    st.fixed_dictionaries({"guided_regex": rules}),
    st.fixed_dictionaries({"regex": rules}),
    st.fixed_dictionaries({"ebnf": grammar}),
    st.fixed_dictionaries({"guided_choice": st.lists(text, max_size=3)}),
    st.fixed_dictionaries({"guided_json": schema | schema.map(json.dumps) | text}),
    st.fixed_dictionaries({"json_schema": schema}),
    st.fixed_dictionaries({"structural_tag": structural_tag | text}),
    st.fixed_dictionaries(
        {"response_format": structural_tag.map(lambda tag: {"type": "structural_tag", **tag})}
    ),
    st.fixed_dictionaries(
        {
            "tools": st.lists(
                st.fixed_dictionaries(
                    {
                        "type": st.just("function"),
                        "function": st.fixed_dictionaries(
                            {"name": text, "parameters": schema}, optional={"strict": st.booleans()}
                        ),
                    }
                ),
                min_size=1,
                max_size=2,
            ),
            "tool_choice": st.sampled_from(["auto", "required"]) | anything,
        }
    ),
)

FIELDS = [*CompletionRequest.model_fields, *ChatRequest.model_fields, *UNSUPPORTED]
fields = st.dictionaries(st.sampled_from(FIELDS), anything, max_size=4)

part = st.fixed_dictionaries({"type": st.just("text"), "text": text}) | anything
markup = st.sampled_from(
    [
        *(
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "<function=f>",
            "<function=f\n",
            "</function>",
        ),
        *("<parameter=a>\n", "<parameter=b\n", "</parameter>", "</parameter", "\n", "a", "1", "{", "}", "'"),
        *('{"name": "f", "arguments": {"a": "1"}}', "[{'x': True}]", "```", "stop"),
    ]
)
written = st.lists(markup, max_size=16).map("".join)
"""What models write: calls, quoted, drifted and cut off."""

cut = st.builds(
    lambda whole, end: json.dumps(whole)[:end], st.dictionaries(text, anything), st.integers(0, 40)
)
"""A call's arguments as a limit leaves them."""

call = st.fixed_dictionaries(
    {
        "id": text,
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": text, "arguments": cut | written | anything}),
    }
)
message = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "tool", "developer"]),
        "content": text | written | st.lists(part),
    },
    optional={
        "tool_calls": st.lists(call | anything, max_size=2),
        "reasoning_content": anything,
        "name": anything,
    },
)
tool = st.fixed_dictionaries(
    {"type": st.just("function"), "function": st.fixed_dictionaries({"name": text, "parameters": anything})}
)
chat = st.fixed_dictionaries(
    {"messages": st.lists(message | anything, max_size=4)},
    optional={
        "tools": st.lists(tool | anything, max_size=2),
        "chat_template_kwargs": st.dictionaries(text, anything, max_size=2),
        "stream": st.booleans(),
    },
)
prompt = text | st.lists(text, max_size=3) | st.lists(st.integers(-2, 300), max_size=5) | anything


many = settings(max_examples=int(os.environ.get("FUZZ_CASES", "50")))


@pytest.fixture(scope="module")
def server(start_shared: Start) -> Server:
    return start_shared("A reply.<tool_call>\n<function=f>\n</function>\n</tool_call>", capacity=10_000)


@pytest.fixture(scope="module")
def writing(start_shared: Start) -> Server:
    """A model that writes what the last message is, special tokens and all."""
    return start_shared(
        lambda prompt: prompt.rpartition("SAY ")[2].partition("<|im_end|>")[0], capacity=10_000
    )


DECLARED = {
    "name": "f",
    "parameters": {"properties": {"a": {"type": "string"}, "b": {"type": "array"}}, "required": ["a"]},
}


@many
@given(said=written, thinking=st.booleans(), stream=st.booleans(), limit=st.integers(1, 80))
def test_what_a_model_writes_is_taken_back(
    writing: Server, said: str, thinking: bool, stream: bool, limit: int
) -> None:
    """In every format; a call that is called complete has arguments that are an object."""
    asked = {"role": "user", "content": f"SAY {said}"}
    for form in FORMATS:
        options: dict[str, Any] = {"functions": [DECLARED], "thinking": thinking, "stream": stream}
        answer = ask(writing, form, [asked], limit=limit, stop=["stop"], **options)
        if answer.ended == "calls":
            assert all(isinstance(arguments, dict) for _, arguments in answer.calls), (form, said)
        history = [asked, *answer.raw, *results_of(form, answer), {"role": "user", "content": "x"}]
        ask(writing, form, history, **options)


def check(server: Server, path: str, body: Any) -> None:
    response = server.http.post(
        path, content=json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    if response.status_code != 200:
        assert 400 <= response.status_code < 500, (body, response.text)
        error_of(response, response.status_code)
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n"), (body, response.text)


@many
@given(body=anything, path=st.sampled_from(["/v1/completions", "/v1/chat/completions", "/invocations"]))
def test_any_json(server: Server, path: str, body: Any) -> None:
    check(server, path, body)


@many
@given(extra=fields, prompt=prompt, path=st.sampled_from(["/v1/completions", "/invocations"]))
def test_completions(server: Server, path: str, prompt: Any, extra: dict[str, Any]) -> None:
    check(server, path, {"prompt": prompt, **extra})


@many
@given(extra=fields, body=chat, path=st.sampled_from(["/v1/chat/completions", "/invocations"]))
def test_chats(server: Server, path: str, body: dict[str, Any], extra: dict[str, Any]) -> None:
    check(server, path, {**body, **extra})


@many
@given(body=chat)
def test_chats_alone(server: Server, body: dict[str, Any]) -> None:
    check(server, "/v1/chat/completions", body)


@many
@given(extra=structured, more=fields, thinking=st.booleans())
def test_formats(server: Server, extra: dict[str, Any], more: dict[str, Any], thinking: bool) -> None:
    messages = [{"role": "user", "content": "x"}]
    check(server, "/v1/chat/completions", {"messages": messages, "enable_thinking": thinking, **extra})
    check(server, "/v1/completions", {"prompt": "x", **more, **extra})
