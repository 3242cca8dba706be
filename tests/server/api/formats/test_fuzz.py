"""Generated requests to Messages, Responses and the token endpoints: each gets a success or a 4xx with the
format's error object."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_serve.server.api.formats.messages.request import MessagesRequest
from qwen_serve.server.api.formats.responses.request import ResponsesRequest
from tests.server.api.conftest import Server, Start
from tests.server.api.test_fuzz import anything, cut, many, text, written

MESSAGES = [*MessagesRequest.model_fields, *MessagesRequest.unsupported]
RESPONSES = [*ResponsesRequest.model_fields, *ResponsesRequest.unsupported, "store", "previous_response_id"]

roles = st.sampled_from(["user", "assistant", "system", "developer", "robot"])
kinds = st.sampled_from(
    ["text", "tool_use", "tool_result", "thinking", "redacted_thinking", "image", "input_text", "output_text"]
)
values = {"text": text | anything, "id": text, "tool_use_id": text, "name": text, "thinking": text}
values |= {"input": st.dictionaries(text, anything, max_size=2) | anything, "content": text | anything}
block = st.fixed_dictionaries({"type": kinds}, optional=values)
content = text | st.lists(block | anything, max_size=3) | anything
message = st.fixed_dictionaries({"role": roles, "content": content})
item_kinds = st.sampled_from(["message", "function_call", "function_call_output", "reasoning", "other"])
item = message | st.fixed_dictionaries(
    {"type": item_kinds},
    optional={
        "role": roles,
        "content": content,
        "summary": content,
        "output": content,
        "call_id": text,
        "name": text,
        "arguments": st.just("{}") | cut | written | anything,
    },
)
tool = st.fixed_dictionaries(
    {"name": text},
    optional={"type": st.just("function") | anything, "input_schema": anything, "parameters": anything},
)


@pytest.fixture(scope="module")
def server(start_shared: Start) -> Server:
    return start_shared("A reply.<tool_call>\n<function=f>\n</function>\n</tool_call>", capacity=10_000)


def check(server: Server, path: str, body: Any) -> None:
    headers = {"content-type": "application/json"}
    response = server.http.post(path, content=json.dumps(body).encode(), headers=headers)
    if response.status_code != 200:
        assert 400 <= response.status_code < 500, (body, response.text)
        assert response.json()["error"]["message"]
    elif response.headers["content-type"].startswith("text/event-stream"):
        last = response.text.strip().split("\n\n")[-1].split("\n")[0]
        assert last in ("event: message_stop", "event: response.completed"), (body, response.text)


@many
@given(
    extra=st.dictionaries(st.sampled_from(MESSAGES), anything, max_size=3),
    messages=st.lists(message | anything, max_size=4),
    tools=st.none() | st.lists(tool | anything, max_size=2),
    stream=st.booleans(),
    path=st.sampled_from(["/v1/messages", "/v1/messages/count_tokens"]),
)
def test_messages(server: Server, extra: Any, messages: Any, tools: Any, stream: bool, path: str) -> None:
    body = {"max_tokens": 999, "messages": messages, "tools": tools, "stream": stream}
    check(server, path, {**body, **{name: value for name, value in extra.items() if name != "max_tokens"}})


@many
@given(
    extra=st.dictionaries(st.sampled_from(RESPONSES), anything, max_size=3),
    given_=text | st.lists(item | anything, max_size=4),
    tools=st.none() | st.lists(tool | anything, max_size=2),
    stream=st.booleans(),
)
def test_responses(server: Server, extra: Any, given_: Any, tools: Any, stream: bool) -> None:
    extra = {name: value for name, value in extra.items() if name != "max_output_tokens"}
    check(server, "/v1/responses", {"input": given_, "tools": tools, "stream": stream, **extra})


@many
@given(
    body=st.dictionaries(
        st.sampled_from(["content", "prompt", "messages", "tokens", "tools", "with_pieces", "model"]),
        text | st.lists(message, max_size=2) | anything,
    ),
    path=st.sampled_from(["/tokenize", "/detokenize", "/apply-template"]),
)
def test_tokens(server: Server, body: Any, path: str) -> None:
    check(server, path, body)
