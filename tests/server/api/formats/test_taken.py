"""Values and fields that other servers take."""

import json
from typing import Any

import pytest

from tests.server.api.conftest import Start
from tests.server.api.formats.test_chat import CALL, HI, PATH, TOOLS
from tests.server.api.formats.test_completions import events

LONG = "word " * 20


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"messages": HI, "max_tokens": -1}),
        (PATH, {"messages": HI, "max_completion_tokens": -1}),
        (PATH, {"messages": HI, "n_predict": -1}),
        ("/v1/completions", {"prompt": "x", "max_tokens": -1}),
        ("/completion", {"prompt": "x", "n_predict": -1}),
        ("/v1/messages", {"messages": HI, "max_tokens": -1}),
        ("/v1/responses", {"input": "x", "max_output_tokens": -1}),
        ("/api/chat", {"messages": HI, "options": {"num_predict": -1}, "stream": False}),
    ],
)
@pytest.mark.parametrize("more", [{}, {"top_p": 0, "verbosity": "low", "text": {"verbosity": "high"}}])
def test_no_limit_and_the_likeliest_token(start_shared: Start, path: str, body: Any, more: Any) -> None:
    if path == "/api/chat":
        body = {
            **body,
            "options": {**body["options"], **({"top_p": 0, "tfs_z": 0.5, "new": 1} if more else {})},
        }
    else:
        body = {**body, **{name: more[name] for name in more if name != "text" or path == "/v1/responses"}}
    server = start_shared(LONG)
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert LONG.strip() in response.text
    assert server.engine.submissions[-1].limit > 1000
    assert server.engine.submissions[-1].params.top_p == (1e-6 if more else 1.0)


@pytest.mark.parametrize("stream", [False, True])
def test_ollamas_log_probabilities(start_shared: Start, stream: bool) -> None:
    server = start_shared("Yes.")
    for path, body in (
        ("/api/chat", {"messages": HI}),
        ("/api/generate", {"prompt": "x"}),
        ("/api/generate", {"prompt": "x", "raw": True}),
    ):
        response = server.http.post(
            path, json={**body, "logprobs": True, "top_logprobs": 2, "stream": stream}
        )
        scores = [
            score for line in response.text.splitlines() for score in json.loads(line).get("logprobs", [])
        ]
        assert "".join(score["token"] for score in scores) == "Yes."
        assert {len(score["top_logprobs"]) for score in scores} == {2}
        plain = server.http.post(path, json={**body, "stream": stream})
        assert "logprobs" not in plain.text


@pytest.mark.parametrize("stream", [False, True])
def test_functions_in_the_older_form(start_shared: Start, stream: bool) -> None:
    """The answer has the older form, and is taken back."""
    server = start_shared(f"Well.\n{CALL}")
    fields: dict[str, Any] = {"functions": [TOOLS[0]["function"]], "function_call": "auto"}
    if stream:
        called: dict[str, str] = {}
        for chunk in events(server, PATH, messages=HI, **fields)[:-1]:
            choice = chunk["choices"][0]
            for key, text in choice["delta"].get("function_call", {}).items():
                called[key] = called.get(key, "") + text
            assert "tool_calls" not in choice["delta"]
        reason = choice["finish_reason"]
    else:
        choice = server.chat(**fields).json()["choices"][0]
        called, reason = choice["message"]["function_call"], choice["finish_reason"]
        assert "tool_calls" not in choice["message"]
    assert (called, reason) == ({"name": "weather", "arguments": '{"city": "Paris"}'}, "function_call")
    past = [
        *HI,
        {"role": "assistant", "content": None, "function_call": called},
        {"role": "function", "name": "weather", "content": "rain"},
    ]
    assert server.chat(messages=past, **fields).status_code == 200
    prompt = server.engine.submissions[-1].text
    assert "<function=weather>\n<parameter=city>\nParis" in prompt
    assert "<tool_response>\nrain" in prompt
    assert server.chat(**{**fields, "function_call": "none"}).json()["choices"][0]["finish_reason"] == "stop"


def test_tools_that_are_no_functions_are_left_out(start_shared: Start) -> None:
    server = start_shared("OK")
    custom = {"type": "custom", "custom": {"name": "patch"}}
    response = server.chat(tools=[custom, {"type": "web_search"}, *TOOLS])
    assert response.status_code == 200
    assert response.headers["x-tools-left-out"] == "patch (custom), web_search"
    assert "patch" not in server.engine.submissions[-1].text
    assert server.chat(tools=[custom], tool_choice="required").status_code == 400
