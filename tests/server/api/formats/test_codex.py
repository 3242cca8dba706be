"""Codex's requests to /v1/responses: its own tools, those of namespaces and those of its host."""

import json
from pathlib import Path
from typing import Any

import pytest

from qwen_serve.server.api.formats.responses.request import ResponsesRequest
from tests.messages import user
from tests.server.api.conftest import Start
from tests.server.api.formats.test_chat import CALL
from tests.server.api.formats.test_responses import ALLOWED, PATH, REPLY, SEARCH, TOOL, ask, events
from tests.server.api.test_bad_input import error_of

CODEX = json.loads((Path(__file__).parent / "codex_request.json").read_text())


@pytest.mark.parametrize("stream", [False, True])
def test_what_codex_sends(start: Start, stream: bool) -> None:
    """Tools that are no functions are left out, with a note; those of a namespace are offered."""
    server = start("Hello!", context_size=20_000)
    body = {**CODEX, "stream": stream}
    response = events(server, **body)[-1]["response"] if stream else ask(server, **body)
    assert response["status"] == "completed"
    assert response["metadata"] == {"tools_left_out": "web_search"}
    assert response["tools"] == [tool for tool in CODEX["tools"] if tool["type"] != "web_search"]
    text = server.engine.submissions[0].text
    assert '"name": "exec_command"' in text
    assert '"name": "multi_agent_v1__close_agent"' in text
    assert "web_search" not in text
    headers = server.post(PATH, **body).headers
    assert headers["x-tools-left-out"] == "web_search"


CUSTOM = {"type": "custom", "name": "apply_patch"}
MEMBERS = {"type": "namespace", "name": "mcp__sky", "description": "Above", "tools": [TOOL, CUSTOM]}


@pytest.mark.parametrize("stream", [False, True])
def test_functions_of_a_namespace(start: Start, stream: bool) -> None:
    call = CALL.replace("weather", "mcp__sky__weather")
    server = start(f"{call}\n{CALL}")
    tools = [TOOL, MEMBERS, {"type": "custom", "name": "x"}]
    past = {
        "type": "function_call",
        "namespace": "mcp__sky",
        "name": "weather",
        "call_id": "1",
        "arguments": "",
    }
    items = [user("x"), past, {"type": "function_call_output", "call_id": "1", "output": "y"}]
    fields: dict[str, Any] = {"input": items, "tools": tools}
    got = events(server, **fields) if stream else []
    response = got[-1]["response"] if stream else ask(server, **fields)
    one, other = (item for item in response["output"] if item["type"] == "function_call")
    assert (one["namespace"], one["name"]) == ("mcp__sky", "weather")
    assert (other.get("namespace"), other["name"]) == (None, "weather")
    added = [event["item"] for event in got if event["type"] == "response.output_item.added"]
    assert not stream or {**one, "arguments": "", "status": "in_progress"} in added
    assert response["tools"] == [TOOL, {**MEMBERS, "tools": [TOOL]}]
    assert response["metadata"] == {"tools_left_out": "apply_patch (custom), x (custom)"}
    prompt = server.engine.submissions[-1].text
    assert "<function=mcp__sky__weather>" in prompt
    assert prompt.count('"name": "mcp__sky__weather"') == 1
    name = {"type": "function", "name": "weather", "namespace": "mcp__sky"}
    asked = ResponsesRequest(**fields, tool_choice=name).chat()
    assert asked.tool_choice == {"type": "function", "function": {"name": "mcp__sky__weather"}}
    asked = ResponsesRequest(**fields, tool_choice={**ALLOWED, "tools": [name]}).chat()
    assert asked.tool_choice == {"type": "allowed_tools", "mode": "auto", "names": ["mcp__sky__weather"]}


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "namespace", "name": "a"}], "tools[0].tools"),
        ([{"type": "namespace", "tools": []}], "tools[0].name"),
        ([{"type": "namespace", "name": "a", "tools": [1]}], "tools[0].tools[0]"),
        ([{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}], "tools[0].tools[0].name"),
        ([MEMBERS, {**TOOL, "name": "mcp__sky__weather"}], "tools[1].name"),
        ([{**TOOL, "name": "mcp__sky__weather"}, MEMBERS], "tools[1].tools[0].name"),
    ],
)
def test_a_namespace_that_is_wrong(start_shared: Start, tools: list[Any], param: str) -> None:
    error = error_of(start_shared("Hi").post(PATH, input="Hi", tools=tools), 400)
    assert error["param"] == param


def test_tools_that_are_left_out_are_not_called(start: Start) -> None:
    server = start("OK")
    left = {"tools_left_out": "web_search"}
    for choice in (None, "auto", "none", ALLOWED):
        response = ask(server, tools=[SEARCH], tool_choice=choice, metadata={"a": "b"})
        assert (response["metadata"], response["tools"]) == ({"a": "b", **left}, [])
    both = {**ALLOWED, "tools": [*ALLOWED["tools"], {"type": "function", "name": "weather"}]}
    asked = ResponsesRequest(input="Hi", tools=[SEARCH, TOOL], tool_choice=both).chat()
    assert asked.tool_choice == {"type": "allowed_tools", "mode": "auto", "names": ["weather"]}
    odd = {"type": "custom", "name": "a\r\nSet-Cookie: \u00e9" + "x" * 1000}
    note = server.post(PATH, input="Hi", tools=[odd]).headers["x-tools-left-out"]
    assert note.startswith("a??Set-Cookie: ?xx")
    assert len(note) == 512


def test_a_summary_that_is_asked_for(start: Start) -> None:
    """The summary is the reasoning itself, since clients such as AI SDK's show nothing else."""
    server = start(REPLY)
    asked = {"effort": "low", "summary": "detailed"}
    got = events(server, reasoning=asked, tools=[TOOL])
    begins = "response.reasoning_summary_"
    told = [event for event in got if event["type"].startswith(begins)]
    deltas = [event["delta"] for event in told if event["type"] == f"{begins}text.delta"]
    whole = "".join(deltas)
    assert whole.strip() == "Hm."
    kinds = [event["type"].removeprefix(begins) for event in told]
    assert kinds == ["part.added", *["text.delta"] * len(deltas), "text.done", "part.done"]
    part = {"type": "summary_text", "text": whole}
    assert told[0]["part"] == {**part, "text": ""}
    assert (told[-2]["text"], told[-1]["part"]) == (whole, part)
    [item] = [item for item in got[-1]["response"]["output"] if item["type"] == "reasoning"]
    assert {(event["item_id"], event["output_index"], event["summary_index"]) for event in told} == {
        (item["id"], 0, 0)
    }
    assert item["summary"] == [part]
    assert item["content"] == [{"type": "reasoning_text", "text": whole}]
    assert got[-1]["response"]["reasoning"] == asked
    [added] = [e["item"] for e in got if e["type"] == "response.output_item.added" and e["output_index"] == 0]
    assert (added["summary"], added["content"]) == ([], [])
    for summary in (None, "none"):
        plain = ask(server, reasoning={"effort": "low", "summary": summary}, tools=[TOOL])
        assert plain["output"][0]["summary"] == []
