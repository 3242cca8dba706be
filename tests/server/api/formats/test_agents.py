"""Conversations of agents in their own wire shapes. The scripted model drifts from a call's form, is cut off
in a call, and quotes tags; each turn goes back in the next request, as the agent sends it."""

import json
from typing import Any

import pytest

from tests.server.api.conftest import Server, Start
from tests.server.api.formats.test_replies import ids
from tests.server.api.formats.wires import PATHS, Answer, answer_of, body_of, results_of

READ: dict[str, Any] = {
    "name": "read",
    "description": "Reads a file",
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}},
        "required": ["path"],
        "additionalProperties": False,
        "$schema": "http://json-schema.org/draft-07/schema#",
    },
}
USAGE = {"stream_options": {"include_usage": True}}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
AGENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Claude Code": (
        "messages",
        {
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.abc; cch=123;"},
                {"type": "text", "text": "You are an agent.", **EPHEMERAL},
            ],
            "metadata": {"user_id": "u"},
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
        },
    ),
    "Codex": (
        "responses",
        {
            "instructions": "You are an agent.",
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "k",
            "text": {"verbosity": "medium"},
            "client_metadata": {"x": "y"},
        },
    ),
    "opencode": (
        "chat",
        {**USAGE, "tool_choice": "auto", "reasoning_effort": "medium", "enable_thinking": None},
    ),
    "Qwen Code": (
        "chat",
        {**USAGE, "temperature": 0.7, "top_p": 0.8, "metadata": {"sessionId": "s"}, "enable_thinking": True},
    ),
    "Cline": ("chat", {**USAGE, "temperature": 0, "parallel_tool_calls": False, "enable_thinking": True}),
    "Continue": (
        "chat",
        {"tool_choice": "auto", "enable_thinking": True, "stop": ["\n/src/", "#- coding: utf-8"]},
    ),
    "aider": ("chat", {"temperature": 0, "enable_thinking": True}),
}
HM = "I look.\n</think>\n\n"
DRIFTED = (
    f"{HM}I read it.\n<tool_call>\n<function=read>\n<parameter=path\na.md\n<parameter=limit>\n5\n"
    "</function>\n</tool_call>"
)
LONG = f"{HM}<tool_call>\n<function=read>\n<parameter=path>\n/src/{'a' * 200}"
QUOTED = (
    "The user wrote ⟦</think>⟧.\n</think>\n\nQwen calls like this:\n⟦<tool_call>\n<function=read>\n"
    "<parameter=path>\na.md\n</parameter>\n</function>\n</tool_call>⟧\nNothing was called."
)


def first(form: str) -> list[Any]:
    text = "Read a.md and write </think> in it."
    if form == "responses":
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}]
    return [{"role": "user", "content": [{"type": "text", "text": text}]}]


@pytest.mark.parametrize("name", AGENTS)
def test_an_agents_conversation(start: Start, name: str) -> None:
    form, fields = AGENTS[name]
    said = [""]
    server = start(lambda _: ids(said[0]))
    functions = None if name == "aider" else [READ]
    history = first(form)

    def turn(text: str, limit: int = 900) -> Answer:
        said[0] = text
        body = {**body_of(form, history, functions=functions, stream=True, limit=limit), **fields}
        answer = answer_of(form, send(server, form, body), stream=True)
        history.extend([*answer.raw, *results_of(form, answer), {"role": "user", "content": "Go on."}])
        return answer

    drifted = turn(DRIFTED)
    assert drifted.reasoning.strip() == "I look."
    if functions:
        assert (drifted.content, drifted.calls) == ("I read it.", [("read", {"path": "a.md", "limit": 5})])
        assert drifted.ended == "calls"
    cut = turn(LONG, limit=100)
    assert cut.ended == "length"
    assert [called for called, _ in cut.calls] == (["read"] if functions else [])
    quoted = turn(QUOTED)
    assert quoted.reasoning.strip() == "The user wrote </think>."
    assert (quoted.calls, quoted.ended) == ([], "stop")
    assert "<tool_call>\n<function=read>" in quoted.content
    assert quoted.content.endswith("Nothing was called.")
    turn(f"{HM}Done.")
    prompt = server.engine.submissions[-1].text
    assert "Nothing was called." in prompt
    assert not functions or "<parameter=path>\n/src/aaaa" in prompt


def send(server: Server, form: str, body: dict[str, Any]) -> Any:
    response = server.http.post(PATHS[form], content=json.dumps(body).encode())
    assert response.status_code == 200, response.text
    return response
