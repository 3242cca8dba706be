"""Ollama's API, with its Python client and by its documentation."""

import json
from typing import Any

import ollama
import pytest

from tests.server.api.conftest import Server, Start

CALL = "<tool_call>\n<function=weather>\n<parameter=place>\nRome\n</parameter>\n</function>\n</tool_call>"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
HI = [{"role": "user", "content": "Hi"}]


def script(prompt: str) -> str:
    if "weather" in prompt and "<tool_response>" not in prompt:
        return CALL
    return "Because.\n</think>\n\nHello" if prompt.endswith("<think>\n") else "Hello"


@pytest.fixture
def server(start: Start) -> Server:
    return start(script, alias="fake")


@pytest.fixture
def client(server: Server) -> ollama.Client:
    return ollama.Client(host=server.url)


def lines(server: Server, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = server.post(path, **body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def error_of(server: Server, status: int, path: str = "/api/chat", **body: Any) -> str:
    least = {"messages": HI} if path == "/api/chat" else {}
    answer = server.post(path, **{**least, "stream": False, **body})
    assert answer.status_code == status, answer.text
    found = answer.json()
    assert found.keys() == {"error"}
    message: str = found["error"]
    return message


def test_a_chat(client: ollama.Client) -> None:
    answer = client.chat("fake", HI, think=True)
    assert (answer.message.content, answer.message.thinking) == ("Hello", "Because.")
    assert (answer.done, answer.done_reason, answer.model) == (True, "stop", "fake")
    assert answer.eval_count == len("Because.\n") + 1 + len("\n\nHello")
    assert answer.prompt_eval_count
    assert answer.total_duration is not None
    assert answer.total_duration >= (answer.eval_duration or 0)
    plain = client.chat("fake", HI, think=False)
    assert (plain.message.content, plain.message.thinking) == ("Hello", None)


def test_a_streamed_chat(client: ollama.Client, server: Server) -> None:
    *parts, last = client.chat("fake", HI, think="low", stream=True)
    assert "".join(part.message.thinking or "" for part in parts) == "Because."
    assert "".join(part.message.content or "" for part in parts) == "Hello"
    assert not any(part.done for part in parts)
    assert (last.done, last.done_reason) == (True, "stop")
    assert last.eval_count
    *_, end = lines(server, "/api/chat", messages=HI)
    assert end["done"], "a stream, unless it is refused"


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_answered(client: ollama.Client, stream: bool) -> None:
    asked: list[Any] = [{"role": "user", "content": "How is the weather?"}]
    answer: Any = client.chat("fake", asked, tools=[WEATHER], stream=stream)
    messages = [part.message for part in answer] if stream else [answer.message]
    calls = [call for message in messages for call in message.tool_calls or ()]
    [call] = calls
    assert (call.function.name, call.function.arguments) == ("weather", {"place": "Rome"})
    asked += [{"role": "assistant", "content": "", "tool_calls": [call]}]
    asked += [{"role": "tool", "tool_name": "weather", "content": "It rains."}]
    assert client.chat("fake", asked, tools=[WEATHER]).message.content == "Hello"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_the_limit_cuts_off_is_left_out(client: ollama.Client, stream: bool) -> None:
    asked: list[Any] = [{"role": "user", "content": "How is the weather?"}]
    whole: Any = client.chat("fake", asked, tools=[WEATHER])
    for limit in range(3, whole.eval_count - len("\n</tool_call>")):
        options = {"num_predict": limit}
        answer: Any = client.chat("fake", asked, tools=[WEATHER], options=options, stream=stream)
        parts = list(answer) if stream else [answer]
        assert [part.message.tool_calls for part in parts if part.message.tool_calls] == [], limit
        assert "<" not in "".join(part.message.content or "" for part in parts), limit
        assert parts[-1].done_reason == "length"


def test_a_question_and_a_raw_text(client: ollama.Client, server: Server) -> None:
    answer = client.generate("fake", "Hi", system="Be brief.", think=False)
    assert (answer.response, answer.thinking, answer.done) == ("Hello", None, True)
    assert "Be brief." in server.engine.submissions[-1].text
    streamed = list(client.generate("fake", "Hi", think=True, stream=True))
    assert "".join(part.response or "" for part in streamed) == "Hello"
    assert "".join(part.thinking or "" for part in streamed) == "Because."
    assert client.generate("fake", "Once upon", raw=True).response == "Hello"
    assert server.engine.submissions[-1].text == "Once upon"
    assert (
        "".join(part.response or "" for part in client.generate("fake", "Once", raw=True, stream=True))
        == "Hello"
    )


def test_nothing_is_asked_but_to_load(client: ollama.Client, server: Server) -> None:
    assert client.generate("fake", keep_alive="10m").done_reason == "load"
    assert client.chat("fake", keep_alive=-1).done_reason == "load"
    assert not server.engine.submissions


def test_options(client: ollama.Client, server: Server) -> None:
    options: dict[str, Any] = {
        "num_predict": 3,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 4,
    }
    options |= {
        "typical_p": 0.8,
        "repeat_last_n": 32,
        "repeat_penalty": 1.2,
        "mirostat": 2,
        "mirostat_tau": 3,
    }
    options |= {"num_ctx": 4096, "num_gpu": 99, "num_keep": 4, "stop": ["x", "y"], "penalize_newline": True}
    answer = client.chat("fake", HI, options=options)
    assert (answer.message.content, answer.done_reason) == ("Hel", "length")
    params = server.engine.submissions[-1].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 7, 0.9, 0.1)
    assert (params.typical_p, params.repeat_last_n, params.repetition_penalty) == (0.8, 32, 1.2)
    assert (params.mirostat, params.mirostat_tau, params.seed) == (2, 3.0, 4)
    client.chat("fake", HI, options={"num_predict": -1})
    client.chat("fake", HI, options={"num_predict": -2})
    assert server.engine.submissions[-1].limit > 3000


def test_a_format_is_a_grammar(server: Server) -> None:
    """The scripted engine follows no grammar, and its error names the field."""
    for wanted in ("json", {"type": "object", "properties": {}}):
        message = error_of(server, 400, format=wanted)
        assert message.startswith("format: cannot be enforced")
    assert error_of(server, 400, format={"enum": [2**60 + 1]}).startswith("format.enum[0]: ")
    assert error_of(server, 400, format="yaml").startswith("format: ")
    assert server.post("/api/chat", messages=HI, format="", stream=False).status_code == 200


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"options": {"num_predict": "all"}}, "options.num_predict"),
        ({"options": []}, "options"),
        ({"think": "much"}, "think"),
        ({"logprobs": 5}, "logprobs"),
        ({"messages": [{"role": "user", "content": "x", "images": "abc"}]}, "messages[0].images"),
        ({"messages": [{"role": "user", "content": "x", "images": ["iVBORabc"]}]}, "messages[0].images[0]"),
        ({"path": "/api/generate", "prompt": "x", "images": ["iVBORabc"]}, "images[0]: "),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "messages[0].tool_calls[0]",
        ),
        ({"path": "/api/generate", "prompt": "x", "template": "{{ .Prompt }}"}, "template"),
        ({"path": "/api/generate", "prompt": "x", "suffix": "y"}, "suffix"),
        ({"path": "/api/generate", "prompt": "x", "raw": True, "system": "y"}, "system"),
    ],
)
def test_what_is_wrong_is_named(server: Server, body: dict[str, Any], field: str) -> None:
    assert field in error_of(server, 400, **body)


def test_what_there_is(client: ollama.Client, server: Server) -> None:
    [model] = client.list().models
    assert (model.model, model.size) == ("fake", 14)
    assert model.details is not None
    assert (model.details.format, model.details.family) == ("gguf", "qwen35")
    [running] = client.ps().models
    assert (running.model, running.context_length) == ("fake", 4096)
    about = client.show("fake")
    assert about.modelinfo is not None
    assert about.modelinfo["general.architecture"] == "qwen35"
    assert about.modelinfo["qwen35.context_length"] == 262144
    assert about.capabilities == ["completion", "tools", "thinking"]
    assert about.template
    assert server.http.get("/api/version").json()["version"].count(".") == 2


def test_what_there_is_not_says_what_to_do(client: ollama.Client) -> None:
    asks: list[Any] = [
        lambda: client.pull("qwen3"),
        lambda: client.push("qwen3"),
        lambda: client.create("mine", from_="qwen3"),
        lambda: client.copy("a", "b"),
        lambda: client.delete("a"),
    ]
    for ask in asks:
        with pytest.raises(ollama.ResponseError, match="qwen-serve serve MODEL") as caught:
            ask()
        assert caught.value.status_code == 501
    with pytest.raises(ollama.ResponseError, match="Qwen3-Embedding"):
        client.embed("a", "text")


def test_a_stream_that_fails_says_so_in_its_last_line(start: Start) -> None:
    server = start(lambda _: [72, RuntimeError("lost")])
    *_, last = lines(server, "/api/chat", messages=HI)
    assert last.keys() == {"error"}
    with pytest.raises(ollama.ResponseError, match="lost"):
        list(ollama.Client(host=server.url).chat("x", HI, stream=True))
