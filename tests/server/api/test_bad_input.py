"""Invalid requests get a 4xx with OpenAI's error object, and do not reach the engine.

The most common mistakes are rows of `qwen_serve/bench/checks/errors.py`, asked of a live server by
test_conformance.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from qwen_serve.server.engine import InvalidPrompt
from tests.messages import assistant, user
from tests.server.api.conftest import Server, Start

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = [user("Hi")]
LONG = "x" * 5000
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def server(start_shared: Start) -> Iterator[Server]:
    server = start_shared("x", max_body_mib=1)
    yield server
    assert not server.engine.submissions


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object, whose fields are checked."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 16.0}, "max_tokens"),
    ({"max_tokens": [16]}, "max_tokens"),
    ({"temperature": True}, "temperature"),
    ({"temperature": {}}, "temperature"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**31}, "top_k"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repeat_penalty": -1}, "repeat_penalty"),
    ({"frequency_penalty": 1e9}, "frequency_penalty"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stream": 1}, "stream"),
    ({"stream_options": []}, "stream_options"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"n": 129}, "n"),
    ({"n": "2"}, "n"),
    ({"model": 7}, "model"),
    # known, and not supported: refused rather than ignored
    ({"logprobs": "yes"}, "logprobs"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": True}}, "logit_bias"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"logit_bias": [["Hello", 1]]}, "logit_bias"),
    ({"logit_bias": [[1, 1, 1]]}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [0, 9999]}, "allowed_token_ids"),
    ({"bad_words": "word"}, "bad_words"),
    ({"bad_words": [""]}, "bad_words"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"min_tokens": 9, "n_predict": 8}, "min_tokens"),
    ({"n_predict": -2}, "n_predict"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
    ({"skip_special_tokens": 0}, "skip_special_tokens"),
    ({"best_of": 3, "n": 2}, "best_of"),
    ({"repeat_last_n": -2}, "repeat_last_n"),
    ({"typical_p": 1.1}, "typical_p"),
    ({"xtc_threshold": "much"}, "xtc_threshold"),
    ({"dynatemp_range": -1}, "dynatemp_range"),
    ({"dry_multiplier": -1}, "dry_multiplier"),
    ({"dry_sequence_breakers": []}, "dry_sequence_breakers"),
    ({"dry_sequence_breakers": ["a" * 41]}, "dry_sequence_breakers"),
    ({"samplers": ["top_k", "tfs_z"]}, "samplers"),
    ({"samplers": ["top_k", "penalties"]}, "samplers"),
    ({"samplers": "kq"}, "samplers"),
    ({"samplers": {"top_k": 1}}, "samplers"),
    ({"adaptive_target": 0.5}, "adaptive_target"),
    ({"stream_options": {"continuous_usage_stats": 1}}, "stream_options.continuous_usage_stats"),
    ({"suffix": "end"}, "suffix"),
    ({"image_data": [{"data": "aaaa", "id": 1}]}, "image_data"),
    ({"n_cmpl": 2}, "n_cmpl"),
    ({"cache_prompt": "no"}, "cache_prompt"),
    ({"request_id": ""}, "request_id"),
    ({"return_token_ids": True}, "return_token_ids"),
    ({"lora": [{"id": 0, "scale": 1}]}, "lora"),
    ({"timings_per_token": "yes"}, "timings_per_token"),
    ({"stop_regex": "a+"}, "stop_regex"),
    ({"mirostat": 3}, "mirostat"),
]


@pytest.mark.parametrize(("fields", "param"), FIELDS)
def test_fields_of_every_endpoint(server: Server, fields: dict[str, Any], param: str) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, {"prompt": "x"}),
        (CHAT, {"messages": HI}),
        ("/invocations", {"prompt": "x"}),
        ("/invocations", {"messages": HI}),
    ]
    for path, body in bodies:
        error = error_of(server.post(path, **{**body, **fields}), 400)
        assert error["param"] == param
        assert param in error["message"]
        assert error["type"] == "invalid_request_error"


PROMPTS = [1.5, True, "", [""], ["a", ""], [[]], [[1], []], [True]]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("path", [COMPLETIONS, "/invocations"])
def test_prompts(server: Server, path: str, prompt: Any) -> None:
    assert error_of(server.post(path, prompt=prompt), 400)["param"] == "prompt"


@pytest.mark.parametrize("echo", [False, True])
def test_the_prompts_before_a_bad_one_are_not_begun(server: Server, echo: bool) -> None:
    assert error_of(server.post(COMPLETIONS, prompt=[[1], [99999]], echo=echo), 400)["param"] == "prompt"


MESSAGES: list[tuple[Any, str]] = [
    ({}, "messages"),
    ([None], "messages[0]"),
    ([*HI, assistant("Hello"), {"role": "robot", "content": "x"}], "messages[2].role"),
    ([{"role": "user", "content": {"text": "Hi"}}], "messages[0].content"),
    ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
    ([user({"type": "text"})], "messages[0].content[0].text"),
    ([user({"type": "image_url", "image_url": {"url": "data:"}})], "messages[0].content[0].type"),
    ([*HI, {"role": "assistant", "tool_calls": "x"}], "messages[1].tool_calls"),
    (
        [*HI, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}],
        "messages[1].tool_calls[0].function.arguments",
    ),
]


@pytest.mark.parametrize(("messages", "param"), MESSAGES)
@pytest.mark.parametrize("path", [CHAT, "/invocations"])
def test_messages(server: Server, path: str, messages: Any, param: str) -> None:
    assert error_of(server.post(path, messages=messages), 400)["param"] == param


CHAT_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"tools": "look"}, "tools"),
    ({"tools": ["look"]}, "tools[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [TOOL], "tool_choice": "perhaps"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"enable_thinking": "yes"}}, "chat_template_kwargs"),
    ({"thinking": "yes"}, "thinking"),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"reasoning": {"effort": ["low"]}}, "reasoning.effort"),
    ({"reasoning": {"depth": 1}}, "reasoning.depth"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"reasoning_effort": 3}, "reasoning_effort"),
    ({"echo": True}, "echo"),
    ({"include_reasoning": "no"}, "include_reasoning"),
    ({"separate_reasoning": 1}, "separate_reasoning"),
    ({"reasoning_format": "raw"}, "reasoning_format"),
    ({"tools": [TOOL] * 1025}, "tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": 5, "mode": "auto"}}, "tool_choice"),
    ({"thinking_repetition_penalty": 0.001}, "thinking_repetition_penalty"),
    ({"continue_final_message": True}, "continue_final_message"),  # the last message is the user's
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"add_generation_prompt": "no"}, "add_generation_prompt"),
    ({"functions": [{"name": "f"}], "tools": [TOOL]}, "functions"),
    ({"functions": [{"name": "f"}], "function_call": "f"}, "function_call"),
]


STRICT: list[tuple[Any, str | None]] = [
    (5, ""),
    ({"required": 5}, ".required"),
    ({"required": [[]]}, ".required"),
    ({"properties": {"a": {"anyOf": 5}}}, ".properties.a.anyOf"),
    ({"properties": {"a": {"oneOf": {"a": 1}}}}, ".properties.a.oneOf"),
    ({"properties": {"a": {"enum": 5}}}, ".properties.a.enum"),
    ({"properties": {"a": {"type": "string", "format": []}}}, ".properties.a.format"),
    ({"properties": {"a": {"type": "string", "minLength": "x"}}}, ".properties.a.minLength"),
    ({"properties": {"a": {"type": "string", "maxLength": 1e300}}}, None),
    ({"properties": {"a": {"type": "string", "maxLength": -1}}}, ".properties.a.maxLength"),
    ({"properties": {"a": {"type": []}}}, None),
    ({"properties": {"a": {"type": "string", "pattern": []}}}, None),
    ({"properties": {"a": {"$ref": []}}}, None),
    ({"properties": {"a": {"allOf": 5}}}, None),
]


@pytest.mark.parametrize(("schema", "param"), STRICT)
def test_parameters_of_strict_tools(server: Server, schema: Any, param: str | None) -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}
    error = error_of(server.post(CHAT, messages=HI, tools=[tool]), 400)
    if param is not None:
        assert error["param"] == f"tools[0].function.parameters{param}"


def options(width: int, depth: int, leaf: Any) -> dict[str, Any]:
    """Parameters whose references share their targets: `width ** depth` ways to read them."""
    defs = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * width} for i in range(depth)}
    shared = {**defs, f"a{depth}": leaf}
    return {"type": "object", "properties": {"a": {"$ref": "#/$defs/a0"}}, "$defs": shared}


@pytest.mark.parametrize("leaf", [{"type": "integer"}, {"type": "string"}, {"type": ["string", "integer"]}])
def test_parameters_that_multiply_are_answered(server: Server, leaf: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": options(9, 7, leaf)}}
    error_of(server.post(CHAT, messages=HI, tools=[tool]), 400)


def test_parameters_with_long_definitions_are_answered(server: Server) -> None:
    """Each would carry them all."""
    properties = {f"p{i}": {"type": "integer"} for i in range(2000)}
    defs = {"long": {"enum": [f"{i:0100d}" for i in range(2000)]}}
    schema = {"type": "object", "properties": properties, "$defs": defs}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}
    assert "characters" in error_of(server.post(CHAT, messages=HI, tools=[tool]), 400)["message"]


def nested(levels: int, schema: Any = None) -> Any:
    for _ in range(levels):
        schema = {"dependentSchemas": {"a": schema or {"type": "null"}}}
    return schema


NAMES = [f"n{i}" for i in range(500)]
MULTIPLIED: Any = {"type": "null"}
for _ in range(4):
    MULTIPLIED = {"propertyNames": {"enum": NAMES}, "additionalProperties": MULTIPLIED}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": {"format": []}}, "guided_json"),
        ({"guided_json": {"allOf": 5, "dependencies": {"a": ["b"]}}}, "guided_json"),
        ({"guided_json": {"propertyNames": {"enum": 5}}}, "guided_json"),
        ({"guided_json": '{"a":' * 50_000}, "guided_json"),
        ({"guided_json": '{"not":' * 900 + "{}" + "}" * 900}, "guided_json"),
        ({"guided_json": '{"const": "\\ud800"}'}, "guided_json"),
        ({"guided_json": '{"maximum": NaN}'}, "guided_json"),
        ({"guided_json": "1" * 5000}, "guided_json"),
        ({"guided_json": nested(80)}, "guided_json"),
        ({"guided_json": MULTIPLIED}, "guided_json"),
        ({"guided_json": {"enum": ["x" * 600_000]}}, "guided_json"),
        ({"guided_regex": "x" * 600_000}, "guided_regex"),
        ({"guided_choice": ["x" * 1000] * 600}, "guided_choice"),
        ({"grammar": "start: x\n" + "x" * 600_000}, "grammar"),
        ({"grammar": "start: @all"}, "grammar"),
        ({"grammar": "start: @answer"}, "grammar"),
        ({"guided_regex": "\0("}, "guided_regex"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": {"a": 1}}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag"),
        ({"structural_tag": {"format": {"type": "robot"}}}, "structural_tag.format.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.format"),
        ({"bad_words": ["x"] * 1025}, "bad_words"),
        ({"bad_words": ["x" * 16_385]}, "bad_words"),
        ({"logit_bias": {str(i): 1 for i in range(16_385)}}, "logit_bias"),
        ({"allowed_token_ids": [1] * 16_385}, "allowed_token_ids"),
        ({"allowed_token_ids": ["a"] * 100_000}, "allowed_token_ids[0]"),
        ({"stop_token_ids": [1] * 16_385}, "stop_token_ids"),
        ({"allowed_token_ids": [10**4000]}, "allowed_token_ids"),
        ({"logit_bias": [[10**4000, 1]]}, "logit_bias"),
    ],
)
def test_what_cannot_be_enforced(server: Server, fields: dict[str, Any], param: str) -> None:
    error = error_of(server.post(CHAT, messages=HI, **fields), 400)
    assert error["param"] == param
    assert len(error["message"]) < 2100


def test_many_tools_and_many_names(server: Server) -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"name": f"f{i}"} for i in range(40_000)]}
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(1000)]
    assert error_of(server.post(CHAT, messages=HI, tools=tools, tool_choice=choice), 400)


@pytest.mark.parametrize(("fields", "param"), CHAT_FIELDS)
def test_fields_of_chats(server: Server, fields: dict[str, Any], param: str) -> None:
    assert error_of(server.post(CHAT, messages=HI, **fields), 400)["param"] == param


def test_a_missing_prompt_is_named(server: Server) -> None:
    assert error_of(server.post(COMPLETIONS), 400)["param"] == "prompt"
    assert error_of(server.post(CHAT), 400)["param"] == "messages"
    assert error_of(server.post("/invocations"), 400)["param"] == "prompt"
    both = server.post("/invocations", prompt="x", messages=HI)
    assert error_of(both, 400)["param"] == "messages"


def test_an_enormous_number(server: Server) -> None:
    body = b'{"prompt": "x", "temperature": 1e999}'
    response = server.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert error_of(response, 400)["param"] == "temperature"


@pytest.mark.parametrize("stream", [False, True])
def test_numbers_that_cannot_be_written_back(server: Server, stream: bool) -> None:
    """Responses repeat what was asked for."""
    tools = '[{"type": "function", "name": "f", "parameters": {"maximum": 1e400}}]'
    for field, value in (("tools", tools), ("metadata", '{"a": [-1e999]}')):
        body = f'{{"input": "x", "{field}": {value}, "stream": {json.dumps(stream)}}}'
        response = server.http.post(
            "/v1/responses", content=body, headers={"content-type": "application/json"}
        )
        assert error_of(response, 400)["param"] == field


@pytest.mark.parametrize(
    "content_type",
    [
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/jsonp",
        "application/json; charset=utf-16",
        "",
    ],
)
def test_content_types(server: Server, content_type: str) -> None:
    response = server.http.post(COMPLETIONS, content=b"{}", headers={"content-type": content_type})
    assert error_of(response, 415)["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=UTF-8", "application/vnd.api+json", None]
)
def test_content_types_that_are_json(start: Start, content_type: str | None) -> None:
    headers = {"content-type": content_type} if content_type else {}
    response = start("x").http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
    assert response.status_code == 200


def test_a_compressed_body(server: Server) -> None:
    response = server.http.post(COMPLETIONS, content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
    assert error_of(response, 415)["code"] == "unsupported_media_type"


def test_a_body_that_is_too_large(server: Server) -> None:
    body = json.dumps({"prompt": "x" * 2**20})
    headers = {"content-type": "application/json"}
    assert (
        error_of(server.http.post(COMPLETIONS, content=body, headers=headers), 413)["code"]
        == "body_too_large"
    )
    # chunked: the size is not announced
    chunks = (body[start : start + 65536].encode() for start in range(0, len(body), 65536))
    assert (
        error_of(server.http.post(COMPLETIONS, content=chunks, headers=headers), 413)["code"]
        == "body_too_large"
    )


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {"messages": HI}, "messages"),
        ("/v1/responses", {"input": "Hi"}, "input"),
        (COMPLETIONS, {"prompt": "Hi"}, "prompt"),
    ],
)
def test_text_without_tokens_has_the_name_of_its_field(
    start: Start, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], field: str
) -> None:
    """Such as a picture in base64 that was sent as text: a word that is too long."""

    def refuse(*_: Any, **__: Any) -> None:
        raise InvalidPrompt("a word is too long")

    server = start("x")
    monkeypatch.setattr(server.engine.vocab, "tokenize", refuse)
    error = error_of(server.post(path, **body), 400)
    assert (error["param"], error["message"]) == (field, f"{field}: a word is too long")
