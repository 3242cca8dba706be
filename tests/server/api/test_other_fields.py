"""Fields that an endpoint lacks: unknown ones, and those of other formats and servers."""

from typing import Any

import pytest

from tests.messages import user
from tests.server.api.conftest import Start

CHAT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def test_unknown_fields_and_nulls_are_ignored(start: Start) -> None:
    server = start("x")
    body = dict.fromkeys(
        [
            "max_tokens",
            "temperature",
            "top_p",
            "seed",
            "stop",
            "stream",
            "n",
            "logprobs",
            "logit_bias",
            "tools",
        ]
    )
    answer = server.chat(**body, user="me", metadata={"a": 1}, service_tier="auto", made_up=[1, 2])
    assert answer.status_code == 200
    neutral = {
        "logprobs": False,
        "top_logprobs": 0,
        "repeat_last_n": 64,
        "cache_prompt": True,
        "n_predict": -1,
        "stop_token_ids": [],
        "bad_words": [],
        "skip_special_tokens": True,
        "priority": 0,
        "response_format": {"type": "text"},
        "best_of": 1,
        "suffix": "",
    }
    assert server.chat(**neutral, logit_bias={}, tool_choice="none").status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "instead"),
    [
        (RESPONSES, {"max_tokens": 5}, "max_output_tokens"),
        (RESPONSES, {"messages": [user("Hi")]}, "input"),
        (RESPONSES, {"response_format": {"type": "json_object"}}, "text.format"),
        (RESPONSES, {"reasoning_effort": "low"}, "reasoning.effort"),
        (RESPONSES, {"n": 2}, "leave it out"),
        (RESPONSES, {"prompt_logprobs": 1}, "leave it out"),
        (RESPONSES, {"reasoning_format": "none"}, "leave it out"),
        (ANTHROPIC, {"response_format": {"type": "json_object"}}, "output_config.format"),
        (ANTHROPIC, {"reasoning_effort": "low"}, "output_config.effort"),
        (ANTHROPIC, {"parallel_tool_calls": False}, "tool_choice.disable_parallel_tool_use"),
        (ANTHROPIC, {"n": 2}, "leave it out"),
        (ANTHROPIC, {"logprobs": True}, "leave it out"),
        (ANTHROPIC, {"max_completion_tokens": 4}, "leave it out"),
    ],
)
def test_a_chats_fields_are_not_passed_over_in_other_formats(
    start_shared: Start, path: str, fields: dict[str, Any], instead: str
) -> None:
    """They request something under names that these formats do not have."""
    least = {"input": "Hi"} if path == RESPONSES else {"messages": [user("Hi")], "max_tokens": 9}
    server = start_shared("Hi")
    answer = server.post(path, **least, **fields)
    assert answer.status_code == 400
    [field] = fields
    message = answer.json()["error"]["message"]
    assert message.startswith(f"{field}: ")
    assert instead in message
    nothing: dict[str, Any] = {"n": 1, "logprobs": False, "best_of": None, "parallel_tool_calls": True}
    nothing["stream_options"] = {}
    assert server.post(path, **least, **nothing).status_code == 200


@pytest.mark.parametrize(
    ("schema", "field"), [({"type": "object"}, "schema"), ({"enum": [2**60 + 1]}, "schema.enum[0]")]
)
def test_what_is_wrong_with_a_schema_has_the_formats_own_name(
    start_shared: Start, schema: dict[str, Any], field: str
) -> None:
    """Whether the translation finds it, or the chat that it becomes. (The scripted engine follows no
    grammar.)"""
    server, given = start_shared("Hi"), {"type": "json_schema", "name": "x", "schema": schema}
    answer = server.post(RESPONSES, input="Hi", text={"format": given}).json()["error"]
    assert answer["param"] == f"text.format.{field}"
    assert answer["message"].startswith(answer["param"])
    least = {"messages": [user("Hi")], "max_tokens": 9}
    answer = server.post(ANTHROPIC, **least, output_config={"format": given}).json()["error"]
    assert answer["message"].startswith(f"output_config.format.{field}")


def test_a_chats_fields_that_other_formats_share(start: Start) -> None:
    server = start("Hi")
    assert server.post(RESPONSES, input="Hi", thinking=True, thinking_budget_tokens=40).status_code == 200
    assert server.engine.submissions[-1].text.endswith("<think>\n")
    least = {"messages": [user("Hi")], "max_tokens": 9}
    assert server.post(ANTHROPIC, **least, reasoning={"effort": "low"}).status_code == 200
    assert server.engine.submissions[-1].text.endswith("<think>\n")
    counted = {"messages": least["messages"], "n": 3, "max_tokens": 5}  # nothing there depends on them
    assert server.post("/v1/messages/count_tokens", **counted).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "instead"),
    [
        (CHAT, {"max_output_tokens": 5}, "max_completion_tokens"),
        (CHAT, {"stop_sequences": ["x"]}, "stop"),
        (CHAT, {"system": "Be brief."}, "messages"),
        (CHAT, {"format": "json"}, "response_format"),
        (CHAT, {"options": {"temperature": 0}}, "fields of their own"),
        (CHAT, {"think": False}, "enable_thinking"),
        (CHAT, {"extra_body": {"top_k": 1}}, "beside the others"),
        (RESPONSES, {"extra_body": {"top_k": 1}}, "beside the others"),
        (ANTHROPIC, {"extra_body": {"top_k": 1}}, "beside the others"),
        ("/v1/completions", {"messages": [user("Hi")]}, "leave it out"),
        ("/v1/completions", {"extra_body": {"top_k": 1}}, "beside the others"),
        ("/api/chat", {"temperature": 0}, "options.temperature"),
        ("/api/chat", {"max_tokens": 5}, "options.num_predict"),
        ("/api/chat", {"max_completion_tokens": 5}, "options.num_predict"),
        ("/api/chat", {"response_format": {"type": "json_object"}}, "format"),
        ("/api/chat", {"reasoning_effort": "low"}, "think"),
        ("/api/chat", {"tool_choice": "required"}, "leave it out"),
        ("/api/chat", {"system": "Be brief."}, "messages"),
        ("/api/generate", {"messages": [user("Hi")]}, "prompt"),
        ("/api/generate", {"seed": 1}, "options.seed"),
    ],
)
def test_fields_of_the_servers_other_formats_are_not_passed_over(
    start_shared: Start, path: str, fields: dict[str, Any], instead: str
) -> None:
    messages = [user("Hi")]
    least: dict[str, Any] = {"messages": messages, "max_tokens": 9}
    if path.startswith("/api"):
        least = {"messages": messages} if path == "/api/chat" else {"prompt": "Hi"}
    elif path != CHAT and path != ANTHROPIC:
        least = {"input": "Hi"} if path == RESPONSES else {"prompt": "Hi"}
    server = start_shared("Hi")
    [field] = fields
    answer = server.post(path, **{**least, **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    message = error if path.startswith("/api") else error["message"]
    assert message.startswith(f"{field}: ")
    assert instead in message
    assert server.post(path, **least, **dict.fromkeys(fields.keys() - least)).status_code == 200


@pytest.mark.parametrize(
    "field",
    [
        *("input_ids", "grammar_lazy", "return_meta_info", "return_prompt_token_ids", "session_params"),
        *("moderation", "extra_key"),
    ],
)
def test_fields_of_other_servers_that_nobody_acts_on(start_shared: Start, field: str) -> None:
    answer = start_shared("Hi").chat(
        **{field: [1] if field == "input_ids" else {"a": 1} if "params" in field else True}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("field", "asking", "neutral"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}], []),
        ("tool_choice", "required", "auto"),
        ("chat_template_kwargs", {"enable_thinking": True}, {"enable_thinking": False}),
    ],
)
def test_completions_have_no_fields_of_a_template(
    start_shared: Start, field: str, asking: Any, neutral: Any
) -> None:
    server = start_shared("Hi")
    for path in ("/v1/completions", "/completion", "/invocations"):
        answer = server.post(path, prompt="Hi", **{field: asking})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        assert server.post(path, prompt="Hi", **{field: neutral}).status_code == 200


@pytest.mark.parametrize(
    ("path", "field", "value", "param"),
    [
        (ANTHROPIC, "thread", {"type": "continue", "previous_message_id": "msg_1"}, "thread"),
        (ANTHROPIC, "compaction", {"type": "compact"}, "compaction"),
        (ANTHROPIC, "thinking", {"type": "adaptive", "display": "brief"}, "thinking.display"),
        (RESPONSES, "reasoning", {"context": "all_turns"}, "reasoning.context"),
        (RESPONSES, "reasoning", {"mode": "pro"}, "reasoning.mode"),
        (RESPONSES, "moderation", {"model": "any"}, "moderation"),
    ],
)
def test_what_only_others_do_is_refused(
    start_shared: Start, path: str, field: str, value: Any, param: str
) -> None:
    chat: dict[str, Any] = {"messages": [user("Hi")], "max_tokens": 9}
    least = {"input": "Hi"} if path == RESPONSES else chat
    answer = start_shared("Hi").post(path, **least, **{field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"{param}: ")


def test_reasoning_that_is_not_wanted_is_left_out(start: Start) -> None:
    server = start("Hm.\n</think>\n\nOK.")
    asked: dict[str, Any] = {"messages": [user("Hi")], "max_tokens": 2000}
    for display, kinds in (("summarized", ["thinking", "text"]), ("omitted", ["text"])):
        thinking = {"type": "enabled", "budget_tokens": 1024, "display": display}
        answer = server.post(ANTHROPIC, **asked, thinking=thinking).json()
        assert [block["type"] for block in answer["content"]] == kinds


def test_the_former_name_of_a_summary(start: Start) -> None:
    server = start("Hm.\n</think>\n\nOK.")
    [item, _] = server.post(
        RESPONSES, input="Hi", reasoning={"effort": "low", "generate_summary": "auto"}
    ).json()["output"]
    assert item["summary"][0]["text"] == "Hm."
