"""/v1/responses, with OpenAI's client."""

import json
from typing import Any

import httpx
import openai
import pytest

from qwen_serve.server.api.formats.responses.request import ResponsesRequest
from qwen_serve.server.engine import GenerationError
from tests.messages import user
from tests.server.api.conftest import Server, Start
from tests.server.api.fakes import FakeVocab
from tests.server.api.formats.test_chat import CALL, EMPTY_THINK, OPEN_THINK
from tests.server.api.test_bad_input import error_of

PATH = "/v1/responses"
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "Of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": None,
}
SEARCH = {"type": "web_search", "external_web_access": False}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
"""What Codex CLI 0.169 sends, its texts shortened."""
USER = "<|im_start|>user\nHi<|im_end|>\n"
REPLY = f"Hm.\n</think>\n\nOK.\n{CALL}\n{CALL}"


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ask(server: Server, **body: Any) -> dict[str, Any]:
    answer = server.post(PATH, **{"input": "Hi", **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events(server: Server, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, named after their objects' types and numbered without gaps."""
    with server.http.stream("POST", PATH, json={"input": "Hi", "stream": True, **body}) as got:
        assert got.status_code == 200, got.read()
        blocks = "".join(got.iter_text()).strip().split("\n\n")
    found = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        assert found[-1]["sequence_number"] == number
    return found


def test_an_answer(start: Start) -> None:
    server = start("Hello!")
    response = ask(server, model="any", instructions="Be brief.", metadata={"a": "b"})
    [item] = response["output"]
    assert item == {
        "type": "message",
        "id": item["id"],
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Hello!", "annotations": [], "logprobs": []}],
    }
    prompt = server.engine.submissions[0]
    assert response["id"].startswith("resp_")
    assert (response["object"], response["status"], response["model"]) == ("response", "completed", "any")
    assert (response["store"], response["metadata"], response["error"]) == (False, {"a": "b"}, None)
    assert response["usage"] == {
        "input_tokens": len(prompt.prompt),
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(prompt.prompt) + 6,
    }
    assert prompt.text == f"<|im_start|>system\nBe brief.<|im_end|>\n{USER}{EMPTY_THINK}"


LOGPROBS = {"include": ["message.output_text.logprobs"], "reasoning": {"effort": "low"}, "tools": [TOOL]}


def test_logprobs_of_the_text_alone(start: Start) -> None:
    """They do not include tokens of the reasoning, which has the same letters, of the tags, or of the
    calls."""
    server = start(f"OK. Hm.\n</think>\n\nOK é.\n{CALL}")
    for fields, n in (({}, 0), ({"top_logprobs": 2}, 2)):
        whole = ask(server, **LOGPROBS, **fields)
        [part] = next(item for item in whole["output"] if item["type"] == "message")["content"]
        told = b"".join(bytes(one["bytes"]) for one in part["logprobs"])
        assert told.decode() == part["text"] == "OK é."
        assert all(one["logprob"] < 0 and len(one["top_logprobs"]) == n for one in part["logprobs"])
        assert whole["top_logprobs"] == n
        streamed = events(server, **LOGPROBS, **fields)
        deltas = [event for event in streamed if event["type"] == "response.output_text.delta"]
        assert [one for event in deltas for one in event["logprobs"]] == part["logprobs"]
        [done] = [event for event in streamed if event["type"] == "response.output_text.done"]
        assert done["logprobs"] == part["logprobs"]
    assert ask(server, top_logprobs=1)["top_logprobs"] == 1
    assert [one.params.logprobs for one in server.engine.submissions] == [0, 0, 2, 2, 1]


def test_the_events_of_a_stream_in_order(start: Start) -> None:
    got = events(start(REPLY), reasoning={"effort": "low"}, tools=[TOOL])
    kinds: list[str] = []
    for event in got:
        kind = event["type"].removeprefix("response.")
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
    texts = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
    done = "output_item.done"
    assert kinds == [
        "created",
        "in_progress",
        *[kind.format("reasoning_text") for kind in texts],
        done,
        *[kind.format("output_text") for kind in texts],
        done,
        *[*call, done] * 2,
        "completed",
    ]
    added = [event["item"] for event in got if event["type"] == "response.output_item.added"]
    finished = [event["item"] for event in got if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in added] == ["reasoning", "message", "function_call", "function_call"]
    assert all(item["status"] == "in_progress" and not item.get("content") for item in added)
    assert [item["id"] for item in added] == [item["id"] for item in finished]
    assert got[0]["response"]["output"] == []
    assert got[-1]["response"]["output"] == finished
    arguments = [event for event in got if event["type"] == "response.function_call_arguments.delta"]
    assert json.loads("".join(event["delta"] for event in arguments if event["output_index"] == 2)) == {
        "city": "Paris"
    }
    assert len(arguments) > 10


@pytest.mark.parametrize("stream", [False, True])
def test_the_clients_response(start: Start, stream: bool) -> None:
    server = start(REPLY)
    fields: Any = {"model": "m", "input": "Hi", "tools": [TOOL], "reasoning": {"effort": "high"}}
    if stream:
        with client(server).responses.stream(**fields) as events:
            seen = [event for event in events if event.type == "response.output_text.delta"]
            response = events.get_final_response()
        assert seen[-1].snapshot == "OK."
    else:
        response = client(server).responses.create(**fields)
    assert response.output_text == "OK."
    reasoning, message, *calls = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert reasoning.content[0].text == "Hm."
    assert message.type == "message"
    assert [(call.name, json.loads(call.arguments)) for call in calls if call.type == "function_call"] == [
        ("weather", {"city": "Paris"})
    ] * 2
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == len("Hm.\n")
    assert response.error is None
    assert server.engine.submissions[0].text.endswith(OPEN_THINK)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
def test_reasoning_is_counted_as_it_comes(start: Start, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Reasoning is not tokenized again on the event loop to be counted."""
    reply = FakeVocab().tokenize("x" * 50 + "\n</think>\n\nOK.", special=True)
    server = start(lambda _: [*reply])
    tokenized: list[str] = []
    tokenize = server.engine.vocab.tokenize

    def counted(text: str, **how: Any) -> list[int]:
        tokenized.append(text)
        return tokenize(text, **how)

    monkeypatch.setattr(server.engine.vocab, "tokenize", counted)
    fields: Any = {"input": "Hi"} if path == "/v1/responses" else {"messages": [user("Hi")]}
    usage = httpx.post(server.url + path, json={**fields, "reasoning": {"effort": "high"}}).json()["usage"]
    details = usage["output_tokens_details" if path == "/v1/responses" else "completion_tokens_details"]
    assert details == {"reasoning_tokens": 51}
    assert not any("x" * 50 in text for text in tokenized)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_the_limit_cuts_off(start: Start, stream: bool) -> None:
    server = start("One, two. Three")
    if stream:
        *_, done, last = events(server, max_output_tokens=3)
        assert done["item"]["status"] == "incomplete"
        assert last["type"] == "response.incomplete"
        response = last["response"]
    else:
        response = ask(server, max_output_tokens=3)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["content"][0]["text"] == "One"
    assert response["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_cut_off_behind_its_name_has_no_arguments(start: Start, stream: bool) -> None:
    call = REPLY[REPLY.index("<tool_call>") :]
    limit = call.index(">\n<parameter") + 1 - len("<tool_call>") + 1
    server = start(call)
    fields: Any = {"max_output_tokens": limit, "tools": [TOOL]}
    response = events(server, **fields)[-1]["response"] if stream else ask(server, **fields)
    assert response["status"] == "incomplete"
    [item] = response["output"]
    assert (item["type"], item["arguments"], item["status"]) == ("function_call", "", "incomplete")
    assert item["name"] == TOOL["name"]


def test_a_whole_conversation_reaches_the_prompt(start: Start) -> None:
    server = start(REPLY)
    first = client(server).responses.create(
        model="m", input="Rain?", tools=[TOOL], reasoning={"effort": "low"}
    )
    items: list[Any] = [
        {"role": "developer", "content": "Rhyme."},
        user({"type": "input_text", "text": "Rain?"}),
        *first.output,
    ]
    outputs = zip(("Sun", [{"type": "input_text", "text": "Rain"}]), first.output[2:], strict=True)
    items += [
        {"type": "function_call_output", "call_id": call.call_id, "output": output}  # type: ignore[union-attr]
        for output, call in outputs
    ]
    items.append({"type": "message", "role": "user", "content": "And?"})
    client(server).responses.create(
        model="m",
        input=items,
        instructions="Be brief.",
        tools=[TOOL],
        store=False,
        include=["reasoning.encrypted_content"],
        parallel_tool_calls=True,
        tool_choice="auto",
    )
    text = server.engine.submissions[-1].text
    assert "\n\nBe brief.\n\nRhyme.<|im_end|>\n<|im_start|>user\nRain?<|im_end|>\n" in text
    call = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
    assert f"<|im_start|>assistant\nOK.\n\n{call}\n{call}<|im_end|>" in text, "the items of a reply are one"
    assert "<tool_response>\nSun\n</tool_response>\n<tool_response>\nRain\n</tool_response><|im_end|>" in text
    assert text.endswith(f"<|im_start|>user\nAnd?<|im_end|>\n{EMPTY_THINK}")


def test_reasoning_comes_before_the_call_that_it_led_to(start: Start) -> None:
    server = start("x")
    call = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Look."}]}
    result = {"type": "function_call_output", "call_id": "1", "output": "Sun"}
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": "zzz"}
    ask(server, input=[user("Hi"), thought, call, result, sealed, call, result])
    calls = "<tool_call>\n<function=weather>\n</function>\n</tool_call><|im_end|>\n"
    text = server.engine.submissions[0].text
    assert f"assistant\n<think>\nLook.\n</think>\n\n{calls}" in text
    assert f"assistant\n<think>\n\n</think>\n\n{calls}" in text


def named(fields: dict[str, Any]) -> str:
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ["Hi"]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [user({"type": "input_image"})]}, "input[0].content[0].image_url"),
        ({"input": [user({"type": "input_image", "image_url": "data:"})]}, "input[0].content[0].image_url"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "other_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"stop": 5}, "stop"),
        ({"seed": 0.5}, "seed"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"structural_tag": 5}, "structural_tag"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "middle"}, "truncation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": "message.output_text.logprobs"}, "include"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": [SEARCH], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [SEARCH], "tool_choice": {**ALLOWED, "mode": "required"}}, "tool_choice.tools"),
        ({"tools": [SEARCH, TOOL], "tool_choice": SEARCH}, "tool_choice.type"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"text": {"verbosity": 1}}, "text.verbosity"),
    ],
    ids=named,
)
def test_bad_requests_are_refused_by_name(start_shared: Start, fields: dict[str, Any], param: str) -> None:
    server = start_shared("x")
    error = error_of(server.post(PATH, **{"input": "Hi", **fields}), 400)
    assert error["param"] == param
    assert param in error["message"]
    assert not server.engine.submissions


def test_a_failure_in_a_stream_is_an_event(start: Start) -> None:
    server = start(lambda _: [104, 105, GenerationError("no memory slot")])
    last = events(server)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert "no memory slot" in last["response"]["error"]["message"]


def test_fields_of_chats_mean_the_same(start: Start) -> None:
    """vLLM's clients send them; OpenAI's send `store: true`, which keeps nothing here."""
    server = start("OK, then. Stop here.")
    fields = {"seed": 3, "top_k": 5, "logit_bias": {"65": -3}, "ignore_eos": True, "stop": ["Stop"]}
    response = ask(server, **fields, store=True, request_id="mine")
    params = server.engine.submissions[-1].params
    assert (params.seed, params.top_k, params.logit_bias, params.ignore_eos) == (3, 5, ((65, -3.0),), True)
    assert response["output"][0]["content"][0]["text"] == "OK, then. "
    assert (response["store"], response["id"]) == (False, "resp_mine")


def test_a_conversation_that_is_too_long_is_cut_where_that_is_asked_for(start: Start) -> None:
    server = start("OK", context_size=100)
    error_of(server.post(PATH, input="x" * 200), 400)
    response = ask(server, input="x" * 200, truncation="auto", max_output_tokens=10)
    assert (response["truncation"], response["usage"]["input_tokens"]) == ("auto", 90)


def test_many_calls_in_a_row() -> None:
    """A list of all earlier calls for each one would take quadratic time."""
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    asked = ResponsesRequest(input=[user("Hi"), *[call] * 100_000])
    [_, reply] = asked.chat().messages
    assert len(reply["tool_calls"]) == 100_000


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ([{"type": "function_call", "name": "f", "call_id": "1", "arguments": 5}], "input[0].arguments"),
        ([{"type": "function_call", "name": "f", "call_id": "1", "arguments": [1]}], "input[0].arguments"),
        ([user("x")] * 17_000, "input"),
    ],
)
def test_errors_speak_of_the_input(start_shared: Start, given: list[Any], param: str) -> None:
    answer = start_shared("Hi").post(PATH, input=given, instructions="Be brief.")
    error = error_of(answer, 400)
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")


def test_a_call_without_arguments_comes_back(start: Start) -> None:
    server = start("Hi")
    call = {"type": "function_call", "name": "f", "call_id": "1", "arguments": " "}
    items = [user("x"), call, {"type": "function_call_output", "call_id": "1", "output": "y"}]
    assert server.post(PATH, input=items).status_code == 200
    assert "<function=f>\n</function>" in server.engine.submissions[-1].text
