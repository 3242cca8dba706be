"""/v1/messages and /v1/messages/count_tokens, with Anthropic's client."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from qwen_serve.server.api.formats.messages.request import reminded
from qwen_serve.server.engine import GenerationError
from tests.messages import assistant, user
from tests.server.api.conftest import Server, Start
from tests.server.api.formats.test_chat import CALL, EMPTY_THINK, OPEN_THINK

PATH = "/v1/messages"
HI: Any = [user("Hi")]
TOOL: Any = {
    "name": "weather",
    "description": "Of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
USER = "<|im_start|>user\nHi<|im_end|>\n"

SEARCH = {"type": "web_search_20250305", "name": "web_search"}


def client(server: Server, key: str = "none") -> anthropic.Anthropic:
    import anthropic

    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


def events(server: Server, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each named after its object's type."""
    with server.http.stream(
        "POST", PATH, json={"messages": HI, "max_tokens": 99, "stream": True, **body}
    ) as got:
        assert got.status_code == 200, got.read()
        blocks = "".join(got.iter_text()).strip().split("\n\n")
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def ask(server: Server, **body: Any) -> httpx.Response:
    return server.post(PATH, **{"messages": HI, "max_tokens": 999, **body})


def error_of(answer: httpx.Response, status: int) -> str:
    """The message of an error, in Anthropic's shape."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    return str(body["error"]["message"])


def test_an_answer(start: Start) -> None:
    server = start("Hello!")
    message = ask(server, model="claude-any", system="Be brief.").json()
    assert message["id"].startswith("msg_")
    prompt = server.engine.submissions[0]
    assert message == {
        "id": message["id"],
        "type": "message",
        "role": "assistant",
        "model": "claude-any",
        "content": [{"type": "text", "text": "Hello!"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(prompt.prompt),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 6,
            "service_tier": "standard",
        },
    }
    assert prompt.text == f"<|im_start|>system\nBe brief.<|im_end|>\n{USER}{EMPTY_THINK}"


def test_the_events_of_a_stream_in_order(start: Start) -> None:
    got = events(
        start(f"Hm.\n</think>\n\nOK.\n{CALL}"),
        thinking={"type": "enabled", "budget_tokens": 2048},
        tools=[TOOL],
    )
    kinds: list[str] = []
    for event in got:
        kind = event.get("delta", {}).get("type", event["type"])
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
    block = ["content_block_start", "{}", "content_block_stop"]
    assert kinds == [
        "message_start",
        "ping",
        *["content_block_start", "thinking_delta", "signature_delta", "content_block_stop"],
        *[part.format("text_delta") for part in block],
        *[part.format("input_json_delta") for part in block],
        "message_delta",
        "message_stop",
    ]
    starts = [event for event in got if event["type"] == "content_block_start"]
    assert [(event["index"], event["content_block"]["type"]) for event in starts] == [
        (0, "thinking"),
        (1, "text"),
        (2, "tool_use"),
    ]
    assert starts[2]["content_block"] == {
        "type": "tool_use",
        "id": starts[2]["content_block"]["id"],
        "name": "weather",
        "input": {},
    }
    assert got[0]["message"]["content"] == []
    assert got[0]["message"]["usage"]["input_tokens"] > 0
    assert got[0]["message"]["usage"]["output_tokens"] == 0
    assert got[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert got[-2]["usage"]["output_tokens"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_the_clients_message(start: Start, stream: bool) -> None:
    server = start(f"Hm.\n</think>\n\nOK.\n{CALL}\n{CALL}")
    fields: Any = {
        "model": "m",
        "max_tokens": 2000,
        "messages": HI,
        "tools": [TOOL],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    if stream:
        with client(server).messages.stream(**fields) as events:
            message = events.get_final_message()
    else:
        message = client(server).messages.create(**fields)
    thought, text, *calls = message.content
    assert thought.type == "thinking"
    assert thought.thinking == "Hm."
    assert thought.signature
    assert text.type == "text"
    assert text.text == "OK."
    assert [(call.type, call.name, call.input) for call in calls if call.type == "tool_use"] == [
        ("tool_use", "weather", {"city": "Paris"})
    ] * 2
    assert len({call.id for call in calls if call.type == "tool_use"}) == 2
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens > 20
    assert server.engine.submissions[0].text.endswith(OPEN_THINK)


@pytest.mark.parametrize("stream", [False, True])
def test_an_empty_answer_is_a_message_too(start: Start, stream: bool) -> None:
    server = start("")
    if stream:
        assert [event["type"] for event in events(server)] == [
            "message_start",
            "ping",
            "message_delta",
            "message_stop",
        ]
    else:
        assert ask(server).json()["content"] == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("end", "written"), [("Pa", '{"city": "Pa'), ("<function=weather>", "")])
def test_a_call_that_the_limit_cuts_off(start: Start, stream: bool, end: str, written: str) -> None:
    limit = CALL.index(end) + len(end) - len("<tool_call>") + 1
    fields: Any = {"model": "m", "max_tokens": limit, "messages": HI, "tools": [TOOL]}
    server = start(CALL)
    if stream:
        with client(server).messages.stream(**fields) as stream_:
            message = stream_.get_final_message()
        got = events(server, max_tokens=limit, tools=[TOOL])
        pieces = [event["delta"].get("partial_json", "") for event in got if "delta" in event]
        assert "".join(pieces) == written
    else:
        message = client(server).messages.create(**fields)
        [call] = message.content
        assert call.type == "tool_use"
        assert call.input == ({"city": "Pa"} if written else {})
    assert message.stop_reason == "max_tokens"


def test_a_whole_conversation_reaches_the_prompt(start: Start) -> None:
    server = start("x")
    messages: Any = [
        user({"type": "text", "text": "Rain?", "cache_control": {"type": "ephemeral"}}),
        assistant(
            {"type": "thinking", "thinking": "Look.", "signature": "s"},
            {"type": "redacted_thinking", "data": "zzz"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}},
            {"type": "tool_use", "id": "toolu_2", "name": "weather", "input": {"city": "Rome"}},
        ),
        user(
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Sun"},
            {
                "type": "tool_result",
                "tool_use_id": "toolu_2",
                "content": [{"type": "text", "text": "Rain"}],
                "is_error": False,
            },
            {"type": "text", "text": "And?"},
        ),
    ]
    system: Any = [
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Rhyme."},
    ]
    client(server).messages.create(
        model="m",
        max_tokens=9,
        messages=messages,
        system=system,
        tools=[TOOL],
        metadata={"user_id": "u"},
        tool_choice={"type": "auto"},
    )
    text = server.engine.submissions[0].text
    assert '{"name": "weather", "description": "Of a city", "parameters": {' in text, "the model's order"
    assert "\n\nBe brief.\n\nRhyme.<|im_end|>\n<|im_start|>user\nRain?<|im_end|>\n" in text
    assert "I look.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n" in text
    assert "<tool_response>\nSun\n</tool_response>\n<tool_response>\nRain\n</tool_response><|im_end|>" in text
    assert text.endswith(f"<|im_start|>user\nAnd?<|im_end|>\n{EMPTY_THINK}")


def test_a_reply_that_the_client_began_is_continued(start: Start) -> None:
    server = start(" 4.")
    message = ask(server, messages=[*HI, assistant("It is")]).json()
    assert message["content"] == [{"type": "text", "text": " 4."}]
    assert server.engine.submissions[0].text == f"{USER}{EMPTY_THINK}It is"


def test_late_system_messages_are_reminders_where_they_stand(start: Start) -> None:
    """They are not moved into the system prompt, since that would no longer be found in the prefix cache."""
    server = start("x")
    use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Sun"}
    messages = [
        *HI,
        {"role": "system", "content": "A tool is new."},
        assistant(use),
        user(result),
        {"role": "system", "content": [{"type": "text", "text": "Hurry."}]},
    ]
    assert ask(server, system="Be brief.", messages=messages).status_code == 200
    text = server.engine.submissions[0].text
    assert text.startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi\n\n<system-reminder>\nA tool is new."
        "\n</system-reminder><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n<tool_call>"
    )
    assert "<tool_response>\nSun\n\n<system-reminder>\nHurry.\n</system-reminder>\n</tool_response>" in text
    first = ask(server, messages=[{"role": "system", "content": "Rhyme."}, *HI])
    assert first.status_code == 200
    assert server.engine.submissions[1].text.startswith("<|im_start|>system\nRhyme.<|im_end|>\n")


NONCES = [("2.1.37.0d9", "fa690"), ("2.1.37.1ab", "00c4e")]


@pytest.mark.parametrize("as_blocks", [True, False])
def test_claude_codes_nonce_leaves_the_prompt_as_it_was(start: Start, as_blocks: bool) -> None:
    server = start("x")
    for version, nonce in NONCES:
        header = f"x-anthropic-billing-header: cc_version={version}; cc_entrypoint=cli; cch={nonce};"
        rest = "You are Claude Code; cch=this stays."
        blocks = [{"type": "text", "text": header}, {"type": "text", "text": rest}]
        assert ask(server, system=blocks if as_blocks else f"{header}\n{rest}").status_code == 200
    one, other = (entry.text for entry in server.engine.submissions)
    assert one == other
    assert "cc_version=2.1.37; cc_entrypoint=cli; cch=0;" in one
    assert "cch=this stays." in one


def test_elsewhere_such_text_is_left_alone(start: Start) -> None:
    server = start("x")
    ask(server, system="Say cch=fa690;")
    ask(server, messages=[user("x-anthropic-billing-header: cch=fa690;")])
    assert all("cch=fa690;" in entry.text for entry in server.engine.submissions)


def text_of(fields: dict[str, Any]) -> str:
    return json.dumps(fields)


PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [user({"type": "image", "source": {}})]}, "messages[0].content[0].source.type"),
        ({"messages": [*HI, {"role": "system", "content": [PICTURE]}]}, "messages[1].content[0].type"),
        ({"messages": [*HI, assistant(PICTURE)]}, "messages[1].content[0].type"),
        (
            {"messages": [user(PICTURE)]},  # nothing reads it
            "messages[0].content[0].source.data",
        ),
        ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text"),
        ({"messages": [user({"type": "tool_result", "content": "x"})]}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": [*HI, assistant({"type": "tool_use", "id": "1", "name": "f", "input": [1]})]},
            "messages[1].content[0].input",
        ),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool"}}, "name"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_format": {"type": "xml"}}, "output_config.format.type"),
        (
            {"output_format": {"type": "json_schema"}, "output_config": {"format": {"type": "xml"}}},
            "output_format",
        ),
    ],
    ids=text_of,
)
def test_bad_requests_are_refused_by_name(start_shared: Start, fields: dict[str, Any], named: str) -> None:
    server = start_shared("x")
    assert named in error_of(ask(server, **fields), 400)
    assert not server.engine.submissions


def test_errors_have_anthropics_shape_everywhere(start: Start) -> None:
    import anthropic

    server = start("x", api_key="secret")
    assert "API key" in error_of(ask(server), 401)
    assert error_of(server.http.post(PATH, content=b"{", headers={"x-api-key": "secret"}), 400)
    assert error_of(server.http.get(f"{PATH}/batches", headers={"x-api-key": "secret"}), 501)
    assert "POST" in error_of(server.http.get(PATH, headers={"x-api-key": "secret"}), 405)
    create = client(server, "secret").messages.create
    assert create(model="m", max_tokens=9, messages=HI).content
    with pytest.raises(anthropic.BadRequestError) as error:
        create(model="m", max_tokens=0, messages=HI)
    assert error.value.type == "invalid_request_error"


def test_a_failure_in_a_stream_is_an_event(start: Start) -> None:
    import anthropic

    server = start(lambda _: [104, 105, GenerationError("no memory slot")])
    last = events(server)[-1]
    assert last["type"] == "error"
    assert last["error"]["type"] == "api_error"
    streamed = client(server).messages.stream(model="m", max_tokens=9, messages=HI)
    with pytest.raises(anthropic.APIStatusError), streamed as stream:
        stream.until_done()


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from qwen_serve.server.api.sse import EventStream

    monkeypatch.setattr(EventStream, "DEFAULT_PING_INTERVAL", 0.005)
    yield


def test_a_long_wait_is_filled_with_pings(often: None, start: Start) -> None:
    got = events(start("ab", delay=0.15))
    assert [event["type"] for event in got].count("ping") > 3


def test_fields_of_chats_mean_the_same(start: Start) -> None:
    server = start("OK, then. Stop here.")
    answer = ask(server, seed=3, repetition_penalty=1.1, stop=["Stop"], request_id="mine").json()
    params = server.engine.submissions[-1].params
    assert (params.seed, params.repetition_penalty) == (3, 1.1)
    assert (answer["content"][0]["text"], answer["id"]) == ("OK, then. ", "msg_mine")
    assert "logit_bias" in error_of(ask(server, logit_bias={"a": 1}), 400)
    assert "adaptive_target" in error_of(ask(server, adaptive_target=1), 400)


@pytest.mark.parametrize("first", [[], HI])
def test_many_system_messages(first: list[Any]) -> None:
    """Looking at all earlier ones for each, or joining each with them, would take quadratic time."""
    notes = [{"role": "system", "content": f"Note {n}. " * 10} for n in range(50_000)]
    made = reminded([*first, *notes, *HI])
    if not first:
        assert made == [*notes, *HI]
        return
    [turn, last] = made
    assert last == HI[0]
    assert turn["content"].startswith("Hi\n\n<system-reminder>\nNote 0. ")
    assert turn["content"].count("</system-reminder>") == 50_000


@pytest.mark.parametrize("stream", [False, True])
def test_tools_that_anthropic_runs_are_left_out(start: Start, stream: bool) -> None:
    server = start("Hi")
    tools = [SEARCH, {"name": "weather", "input_schema": {"type": "object"}}]
    ask = {"messages": [user("Hi")], "max_tokens": 5, "tools": tools, "stream": stream}
    answer = server.post("/v1/messages", **ask)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-tools-left-out"] == "web_search (web_search_20250305)"
    assert "weather" in server.engine.submissions[0].text
    assert "web_search" not in server.engine.submissions[0].text
    assert "x-tools-left-out" not in server.post("/v1/messages", **{**ask, "tools": tools[1:]}).headers
