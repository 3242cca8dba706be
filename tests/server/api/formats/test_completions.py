"""/v1/completions and /invocations with a prompt."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from qwen_serve.server.chat import Detokenizer, ReplyParser
from tests.messages import user
from tests.server.api.conftest import Server, Start
from tests.waiting import wait_until

HI = [user("Hi")]


def events(server: Server, path: str, **body: Any) -> list[Any]:
    """The events of a streamed response; the last is "[DONE]" or an error."""
    with server.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def test_the_model_is_named_when_the_request_names_none(start: Start) -> None:
    assert start("x").post("/v1/completions", prompt="a").json()["model"] == "fake"
    assert start("x", alias="qwen").post("/v1/completions", prompt="a").json()["model"] == "qwen"


@pytest.mark.parametrize(
    ("path", "fields", "limit"),
    [
        ("/v1/completions", {}, 16),
        ("/v1/completions", {"max_tokens": None}, 16),
        ("/v1/completions", {"n_predict": 7}, 7),
        ("/v1/completions", {"n_predict": 0}, 0),
        ("/v1/completions", {"n_predict": -1}, 4095),
        ("/v1/completions", {"n_predict": 7, "max_tokens": 5}, 5),
        ("/v1/completions", {"max_completion_tokens": 20}, 20),
        ("/invocations", {}, 4095),
        ("/invocations", {"n_predict": 7}, 7),
    ],
)
def test_the_default_limit(start_shared: Start, path: str, fields: Any, limit: int) -> None:
    server = start_shared("abcdef")
    assert server.post(path, prompt="x", **fields).status_code == 200
    assert server.engine.submissions[-1].limit == limit


def test_special_tokens_in_a_raw_prompt_are_tokens(start: Start) -> None:
    server = start("x")
    server.post("/v1/completions", prompt="<|im_start|>user")
    assert server.engine.submissions[0].prompt[0] == 257


def test_n_answers_differ_by_seed(start: Start) -> None:
    server = start("ok")
    answer = server.post("/v1/completions", prompt=["a", "b"], n=2, seed=7, temperature=1).json()
    assert len(answer["choices"]) == 4
    assert [(entry.text, entry.params.seed) for entry in server.engine.submissions] == [
        ("a", 7),
        ("a", 8),
        ("b", 7),
        ("b", 8),
    ]
    assert answer["usage"]["prompt_tokens"] == 2, "a prompt counts once, however many answers it gets"
    assert answer["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_generation_at_once(start: Start, stream: bool) -> None:
    server = start("one STOP" + "x" * 2000)
    server.post("/v1/completions", prompt="x", stop="STOP", stream=stream).read()
    [entry] = server.engine.submissions
    wait_until(lambda: entry.finished)
    assert entry.sent < 1000


@pytest.mark.parametrize(
    ("path", "fields"), [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": HI})]
)
def test_usage_so_far_in_every_chunk(start: Start, path: str, fields: dict[str, Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _ = events(start("abcd"), path, **fields, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 4, 4]
    assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)
    *chunks, _ = events(start("abcd"), path, **fields, stream_options={"continuous_usage_stats": True})
    assert not any("usage" in chunk for chunk in chunks)


def test_timings(start: Start) -> None:
    timings = start("abc", delay=0.002).post("/v1/completions", prompt="xy").json()["timings"]
    assert timings["prompt_n"] == 2
    assert timings["predicted_n"] == 3
    assert timings["prompt_ms"] > 0
    assert timings["predicted_per_second"] == pytest.approx(2 / timings["predicted_ms"] * 1000)


@pytest.mark.parametrize(
    ("path", "body", "at_once"),
    [
        ("/v1/completions", {"prompt": "x"}, True),
        ("/v1/completions", {"prompt": "x", "stream": True}, False),
        ("/v1/completions", {"prompt": "x", "stop": "y"}, False),
        ("/v1/chat/completions", {"messages": HI}, True),
        ("/v1/chat/completions", {"messages": HI, "stream": True}, False),
        ("/v1/chat/completions", {"messages": HI, "parallel_tool_calls": False}, False),
    ],
)
def test_an_answer_nobody_can_use_a_part_of_is_delivered_once(
    start: Start, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], at_once: bool
) -> None:
    """It is also processed only once, since it may have thousands of tokens and other requests wait for the
    loop."""
    server = start("abc " * 100, delay=0.0001)
    fed = 0

    def counted(feed: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any) -> Any:
            nonlocal fed
            fed += 1
            return feed(*arguments)

        return count

    monkeypatch.setattr(Detokenizer, "decode", counted(Detokenizer.decode))
    monkeypatch.setattr(ReplyParser, "feed", counted(ReplyParser.feed))
    server.post(path, **body, n=3).read()
    assert [entry.request.stream for entry in server.engine.submissions] == [not at_once] * 3
    deliveries = [entry.deliveries for entry in server.engine.submissions]
    assert (deliveries == [1] * 3) == at_once
    stages = 2 if "messages" in body else 1
    assert (fed == 3 * stages) == at_once


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_timings_in_every_chunk(start: Start, path: str) -> None:
    server = start("Hello there", delay=0.002)
    fields: dict[str, Any] = (
        {"prompt": "Hi", "max_tokens": 11} if "chat" not in path else {"messages": [user("Hi")]}
    )
    plain = events(server, path, **fields)[:-1]
    assert ["timings" in chunk for chunk in plain] == [False] * (len(plain) - 1) + [True]
    timed = [chunk["timings"] for chunk in events(server, path, **fields, timings_per_token=True)[:-1]]
    counts = [timings["predicted_n"] for timings in timed]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 11
    assert all(timings["predicted_ms"] > 0 and timings["prompt_n"] > 0 for timings in timed[1:])
    several = events(server, path, **fields, timings_per_token=True, n=2)[:-1]
    assert not any("timings" in chunk for chunk in several)
