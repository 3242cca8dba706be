"""/v1/chat/completions and /invocations with messages."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from qwen_serve.server.chat import bounded_template
from tests.server.api.conftest import TEMPLATE, Start
from tests.server.api.formats.test_completions import events
from tests.waiting import wait_until

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
EMPTY_THINK = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
OPEN_THINK = "<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize(
    ("fields", "default", "thinks"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"chat_template_kwargs": {"enable_thinking": True}}, False, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, True, False),
        ({"thinking": True}, False, True),
        ({"thinking": False}, True, False),
        ({"thinking": {"type": "enabled"}}, False, True),
        ({"thinking": {"type": "disabled"}}, True, False),
        ({"reasoning_effort": "low"}, False, True),
        ({"reasoning_effort": "none"}, True, False),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, False, False),
        ({"reasoning_effort": "none", "thinking": True}, False, True),
        ({"chat_template_kwargs": {"enable_thinking": None}, "thinking": True}, False, True),
    ],
)
def test_thinking_is_asked_for(
    start_shared: Start, fields: dict[str, Any], default: bool, thinks: bool
) -> None:
    server = start_shared("x", thinking=default)
    assert server.chat(**fields).status_code == 200
    assert server.engine.submissions[-1].text.endswith(OPEN_THINK if thinks else EMPTY_THINK)


def test_reasoning_inline(start: Start) -> None:
    server = start("One and one...\n</think>\n\nTwo.", inline_reasoning=True)
    message = server.chat(thinking=True).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "<think>\nOne and one...\n</think>\n\nTwo."}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reasoning_format": "none"}, {"content": "<think>\nOne and one...\n</think>\n\nTwo."}),
        ({"separate_reasoning": False}, {"content": "<think>\nOne and one...\n</think>\n\nTwo."}),
        ({"reasoning_format": "deepseek"}, {"content": "Two.", "reasoning_content": "One and one..."}),
        ({"separate_reasoning": True}, {"content": "Two.", "reasoning_content": "One and one..."}),
        ({"include_reasoning": False}, {"content": "Two."}),
    ],
)
@pytest.mark.parametrize("inline", [False, True])
def test_where_the_reasoning_goes(
    start_shared: Start, fields: dict[str, Any], message: dict[str, str], inline: bool
) -> None:
    server = start_shared("One and one...\n</think>\n\nTwo.", inline_reasoning=inline)
    answer = server.chat(thinking=True, **fields).json()["choices"][0]["message"]
    assert answer == {"role": "assistant", **message}
    deltas: dict[str, str] = {}
    for chunk in events(server, PATH, messages=HI, thinking=True, **fields)[:-1]:
        for field, text in chunk["choices"][0]["delta"].items():
            deltas[field] = deltas.get(field, "") + text
    assert deltas == {"role": "assistant", **message}


def test_the_clients_id_is_the_answers(start: Start) -> None:
    server = start("Two.")
    assert server.chat(request_id="mine").json()["id"] == "chatcmpl-mine"
    assert server.post("/v1/completions", prompt="Hi", request_id="mine").json()["id"] == "cmpl-mine"


def test_without_the_version(start: Start) -> None:
    """llama-server also has the path without the version."""
    server = start("Two.")
    assert server.post("/chat/completions", messages=HI).json()["choices"][0]["message"]["content"] == "Two."
    assert server.post("/responses", input="Hi").json()["object"] == "response"
    assert server.http.get("/models").json() == server.http.get("/v1/models").json()


def test_a_template_that_never_thinks(start: Start) -> None:
    server = start("Two.", chat_template=TEMPLATE.with_name("qwen_no_think.jinja"))
    message = server.chat(thinking=True).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Two."}


def test_a_stream_without_text_still_has_a_role_and_an_end(start: Start) -> None:
    [chunk, done] = events(start(""), PATH, messages=HI)
    assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunk["choices"][0]["finish_reason"] == "stop"
    assert done == "[DONE]"


def test_tool_calls(start: Start) -> None:
    server = start(f"Let me look.\n{CALL}")
    answer = server.chat(tools=TOOLS).json()["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] == "Let me look."
    [call] = answer["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["id"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert "weather" in server.engine.submissions[0].text


def test_tool_calls_streamed(start: Start) -> None:
    *chunks, _ = events(start(CALL + "\n" + CALL), PATH, messages=HI, tools=TOOLS)
    calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    heads = [call for call in calls if "id" in call]
    assert [(call["index"], call["function"]) for call in heads] == [
        (index, {"name": "weather", "arguments": ""}) for index in (0, 1)
    ]
    assert len({call["id"] for call in heads}) == 2
    for index in (0, 1):
        pieces = [call["function"]["arguments"] for call in calls if call["index"] == index]
        assert json.loads("".join(pieces)) == {"city": "Paris"}
        assert "P" in pieces, "a string's characters come one by one, as this engine writes them"
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_call_alone_has_no_content(start: Start) -> None:
    assert start(CALL).chat(tools=TOOLS).json()["choices"][0]["message"]["content"] is None


def test_a_call_cut_by_the_limit_stays_cut_off(start: Start) -> None:
    server = start(CALL)
    choice = server.chat(tools=TOOLS, max_tokens=CALL.index("ris") - len("<tool_call>") + 1).json()[
        "choices"
    ][0]
    assert choice["finish_reason"] == "length"
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "Pa'


def test_a_call_cut_off_before_its_parameters_is_no_content(start: Start) -> None:
    """Streamed or not, whichever token is the last."""
    server = start(f"So:\n{CALL}")
    for limit in range(len("So:\n") + 1, len("So:\n") + len("x\n<function=weather>\n<parameter=city")):
        choice = server.chat(tools=TOOLS, max_tokens=limit).json()["choices"][0]
        named = limit >= len("So:\n") + len("x\n<function=weather>")
        names = [call["function"] for call in choice["message"].get("tool_calls", [])]
        assert names == [{"name": "weather", "arguments": ""}] * named, limit
        assert (choice["message"]["content"], choice["finish_reason"]) == ("So:", "length"), limit
        *chunks, _ = events(server, PATH, messages=HI, tools=TOOLS, max_tokens=limit)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("content", "") for delta in deltas) == "So:"
        heads = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
        assert heads == names
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_tool_choice_none_hides_the_tools(start: Start) -> None:
    server = start(CALL)
    choice = server.chat(tools=TOOLS, tool_choice="none").json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == CALL
    assert "weather" not in server.engine.submissions[0].text


def test_a_single_call_where_parallel_ones_are_not_wanted(start: Start) -> None:
    server = start(CALL + "\n" + CALL + "x" * 2000)
    choice = server.chat(tools=TOOLS, parallel_tool_calls=False).json()["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
    [entry] = server.engine.submissions
    wait_until(lambda: entry.finished)
    assert entry.sent < 1000, "the call was the end of it"


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, f"{EMPTY_THINK}Well, "),
        ({"continue_final_message": True}, f"{EMPTY_THINK}Well, "),
        ({"continue_final_message": True, "add_generation_prompt": False}, f"{EMPTY_THINK}Well, "),
        ({"continue_final_message": False}, f"{EMPTY_THINK}Well,<|im_end|>\n{EMPTY_THINK}"),
        ({"add_generation_prompt": True}, f"{EMPTY_THINK}Well,<|im_end|>\n{EMPTY_THINK}"),
        ({"add_generation_prompt": False}, f"{EMPTY_THINK}Well,<|im_end|>\n"),
    ],
)
def test_an_assistants_last_message_is_continued(
    start_shared: Start, fields: dict[str, Any], end: str
) -> None:
    server = start_shared("yes.")
    answer = server.chat(messages=[*HI, {"role": "assistant", "content": "Well, "}], **fields).json()
    assert server.engine.submissions[-1].text == f"<|im_start|>user\nHi<|im_end|>\n{end}"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "yes."}


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("response_format.schema", {"response_format": {"type": "json_object"}}),
        (
            "tool_choice",
            {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
        ),
    ],
)
def test_what_is_continued_has_no_format_from_its_beginning(
    start: Start, param: str, fields: dict[str, Any]
) -> None:
    """Found before anything is tokenized: the message would be too long, too."""
    begun = {"role": "assistant", "content": "Well, " * 4096}
    answer = start("x").chat(messages=[*HI, begun], **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert "contradicts a message that the reply continues" in answer.json()["error"]["message"]


def test_reasoning_that_breaks_off_is_continued(start: Start) -> None:
    server = start(" so.</think>\n\nYes.")
    messages = [*HI, {"role": "assistant", "content": None, "reasoning_content": "Hm,"}]
    message = server.chat(messages=messages).json()["choices"][0]["message"]
    assert server.engine.submissions[0].text.endswith(f"{OPEN_THINK}Hm,")
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": "so."}


def test_an_answer_that_has_begun_does_not_think(start: Start) -> None:
    server = start("yes.")
    messages = [*HI, {"role": "assistant", "content": "Well, "}]
    message = server.chat(messages=messages, thinking=True).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "yes."}


def test_a_slow_template_does_not_hold_the_event_loop(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short the request, it is rendered on a thread."""
    monkeypatch.setattr(bounded_template, "SECONDS", 0.3)
    path = tmp_path / "slow.jinja"
    loops = "{% for _ in range(99999) %}{% for _ in range(99999) %}{% endfor %}{% endfor %}"
    path.write_text("{{ messages[0].content }}{% if messages|length > 1 %}" + loops + "{% endif %}")
    server = start("Two.", chat_template=path)
    begun: list[str] = []
    begin = bounded_template.BoundedEnvironment.begin

    def recorded(self: bounded_template.BoundedEnvironment) -> None:
        begin(self)
        begun.append(threading.current_thread().name)

    monkeypatch.setattr(bounded_template.BoundedEnvironment, "begin", recorded)
    assert server.chat().status_code == 200
    reply = server.chat(messages=[{"role": "user", "content": "Hi"}] * 2)
    assert reply.status_code == 400
    assert "takes more than 0.3 s" in reply.json()["error"]["message"]
    assert len(begun) == 2
    assert all(name.startswith("small-work") for name in begun)
