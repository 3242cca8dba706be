"""The log's line for a request, its id, and the log's line of throughput."""

import asyncio
import logging
import re
from typing import Any

import pytest

from qwen_serve.server.api.observe.throughput import report_throughput, throughput_line
from qwen_serve.server.engine import EngineStats
from qwen_serve.server.engine.prefix_cache import PrefixStats
from qwen_serve.server.engine.speculation import DrafterStats
from tests.server.api.conftest import Start
from tests.waiting import until, wait_until


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "qwen_serve.server.api.middleware")
    return caplog


def test_an_answer_is_a_line(start: Start, lines: pytest.LogCaptureFixture) -> None:
    server = start("Hello there")
    answer = server.chat()
    request_id = answer.headers["x-request-id"]
    wait_until(lambda: len(lines.messages) == 1)
    usage = answer.json()["usage"]
    assert re.fullmatch(
        rf"POST /v1/chat/completions 200, {usage['prompt_tokens']} tokens in \(0 cached\), "
        rf"{usage['completion_tokens']} out.*, \d+ ms, id {request_id}",
        lines.messages[0],
    )


def test_how_long_it_waited_and_why_is_told(start: Start, lines: pytest.LogCaptureFixture) -> None:
    server = start("Hello")
    before = server.engine.submit

    def submit(*arguments: Any, **options: Any) -> Any:
        generation = before(*arguments, **options)
        timings = generation.request.timings
        timings.submitted, timings.waited_for, timings.preempted = timings.started - 1.5, "a slot", 2
        return generation

    server.engine.submit = submit  # type: ignore[method-assign]
    server.chat()
    wait_until(lambda: len(lines.messages) == 1)
    assert "5 out, waited 1500 ms for a slot, made room 2 times, first after" in lines.messages[0]


def test_a_stream_is_one_too(start: Start, lines: pytest.LogCaptureFixture) -> None:
    server = start("Hello there")
    answer = server.chat(stream=True)
    wait_until(lambda: len(lines.messages) == 1)
    assert "11 out" in lines.messages[0]
    assert answer.headers["x-request-id"] in lines.messages[0]


def test_a_refusal_says_why(start: Start, lines: pytest.LogCaptureFixture) -> None:
    server = start("x", api_key="secret")
    server.http.headers["authorization"] = "Bearer secret"
    server.chat(temperature=-1)
    server.post("/v1/nothing")
    del server.http.headers["authorization"]
    server.chat()
    wait_until(lambda: len(lines.messages) == 3)
    assert "400, temperature: " in lines.messages[0]
    assert "404, " in lines.messages[1]
    assert "401, the API key is missing or wrong" in lines.messages[2]


def test_a_stream_that_fails_says_why(start: Start, lines: pytest.LogCaptureFixture) -> None:
    server = start(lambda _: [65, 66, RuntimeError("no more")])
    server.chat(stream=True)
    wait_until(lambda: lines.messages[-1:] != [] and lines.messages[-1].startswith("POST"))
    assert "200, generation failed: no more, " in lines.messages[-1]
    assert "2 out" in lines.messages[-1]


def test_the_clients_id_is_taken_over(start: Start, lines: pytest.LogCaptureFixture) -> None:
    server = start("x")
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    answer = server.http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    for wrong in ("a b", "x" * 200):
        answer = server.http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": wrong})
        assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])


def test_no_client_writes_lines_of_its_own(start: Start, lines: pytest.LogCaptureFixture) -> None:
    start("x").post("/a%0aforged%1b%5b31m")
    wait_until(lambda: len(lines.messages) == 1)
    assert "\n" not in lines.messages[0]
    assert "\x1b" not in lines.messages[0]
    assert lines.messages[0].count("%0A") == 2  # the path, and the message that repeats it


def stats(**changes: object) -> EngineStats:
    nothing = {"running": 0, "waiting": 0, "steps": 0, "prompt_tokens": 0, "generated_tokens": 0}
    rest = {"preemptions": 0, "kv_cells_used": 0, "kv_cells": 100}
    return EngineStats(**{**nothing, **rest, **changes})  # type: ignore[arg-type]


def test_throughput() -> None:
    later = stats(
        running=2,
        waiting=1,
        steps=9,
        prompt_tokens=500,
        generated_tokens=1000,
        kv_cells_used=25,
        prefix=PrefixStats(hits=3, misses=1),
        drafts={"mtp": DrafterStats(drafted=10, accepted=7)},
    )
    assert throughput_line(stats(), later, 10) == (
        "prompt 50.0 tok/s, generation 100.0 tok/s, running 2, waiting 1, KV cache 25%, "
        "prefix cache hits 75%, drafts accepted 70%"
    )


async def test_throughput_is_told_of_work_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    class Engine:
        steps = looks = 0

        def stats(self) -> EngineStats:
            self.looks += 1
            return stats(steps=self.steps)

    class Loaded:
        engine = Engine()

    class Service:
        loaded, loads = Loaded(), 1

    reporter = asyncio.create_task(report_throughput(Service(), interval=0.01))  # type: ignore[arg-type]
    for steps in (0, 5):
        looks, Engine.steps = Loaded.engine.looks, steps
        await until(lambda: Loaded.engine.looks > looks + 3)  # noqa: B023
        assert bool(caplog.messages) == bool(steps)
    reporter.cancel()
    assert [message.startswith("prompt 0.0 tok/s") for message in caplog.messages] == [True]
