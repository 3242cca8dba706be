"""The client reads answers and streams, records arrival times, and reports errors clearly."""

import asyncio

import pytest

from qwen_serve.bench.errors import BenchError, ServerError, UnreachableError
from qwen_serve.bench.load.client import Client
from tests.bench.fake_server import Body, FakeServer, Script

FIELDS: Body = {"prompt": "water wood water wood water", "max_tokens": 6, "temperature": 0.0}
CHAT: Body = {"messages": [{"role": "user", "content": "What is 2+2?"}], "max_tokens": 64, "thinking": True}


async def test_whole_and_streamed_answers_agree() -> None:
    with FakeServer() as server:
        async with Client(server.url) as client:
            whole = await client.complete("/v1/completions", FIELDS)
            streamed = await client.stream("/v1/completions", FIELDS)
    assert whole.text == streamed.text == "water "
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 6
    assert streamed.usage is not None
    assert streamed.usage.completion_tokens == 6
    assert whole.finish_reason == streamed.finish_reason == "length"
    assert whole.arrivals == []
    assert len(streamed.arrivals) == 6


async def test_reasoning_is_told_from_the_answer() -> None:
    with FakeServer() as server:
        async with Client(server.url + "/v1/") as client:
            whole = await client.complete("/v1/chat/completions", CHAT)
            streamed = await client.stream("/v1/chat/completions", CHAT)
    assert whole.text == streamed.text == "The answer is 4."
    assert whole.reasoning == streamed.reasoning == "I add 2 and 2, which gives 4."


async def test_arrivals_are_when_tokens_came() -> None:
    with FakeServer(Script(first_token_delay=0.1, token_delay=0.05)) as server:
        async with Client(server.url) as client:
            done = await client.stream("/v1/completions", FIELDS)
    assert done.seconds_per_token is not None
    assert done.arrivals[0] >= 0.1
    assert done.arrivals[-1] >= 0.1 + 5 * 0.05, "on a slow machine later, never earlier"
    assert done.seconds_per_token == pytest.approx((done.arrivals[-1] - done.arrivals[0]) / 5)
    assert done.arrivals == sorted(done.arrivals)
    assert done.seconds >= done.arrivals[-1]


async def test_an_idle_connection_is_used_again() -> None:
    with FakeServer() as server:
        async with Client(server.url) as client:
            for _ in range(3):
                await client.stream("/v1/completions", FIELDS)
    assert server.connections == 1


async def test_a_kept_connection_that_was_closed_is_replaced() -> None:
    with FakeServer(Script(requests_a_connection=2)) as server:
        async with Client(server.url) as client:
            texts = [(await client.complete("/v1/completions", FIELDS)).text for _ in range(7)]
            streamed = [(await client.stream("/v1/completions", FIELDS)).text for _ in range(5)]
    assert len(set(texts + streamed)) == 1
    with (
        FakeServer(Script(requests_a_connection=0)) as server,
        pytest.raises(UnreachableError, match="broke"),
    ):
        async with Client(server.url) as client:
            await client.complete("/v1/completions", FIELDS)


async def test_an_error_status_carries_the_servers_words() -> None:
    with FakeServer() as server:
        async with Client(server.url) as client:
            with pytest.raises(ServerError, match=r"answered 400: prompt: want a string") as whole:
                await client.complete("/v1/completions", {"prompt": 5})
            with pytest.raises(ServerError, match="answered 400"):
                await client.stream("/v1/completions", {"prompt": 5})
    assert whole.value.status == 400


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (Script(end_streams=False), "without \\[DONE\\]"),
        (Script(on_event=lambda *_: {"error": {"message": "out of memory"}}), "broke off: out of memory"),
        (Script(on_event=lambda _, event: {**event, "usage": {"prompt_tokens": "x"}}), "malformed usage"),
    ],
    ids=["torn", "error event", "usage"],
)
async def test_broken_streams(script: Script, message: str) -> None:
    with FakeServer(script) as server:
        async with Client(server.url) as client:
            with pytest.raises(ServerError, match=message):
                await client.stream("/v1/completions", FIELDS)


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": [{}]}, {"choices": None}])
async def test_an_answer_without_a_completion(answer: Body) -> None:
    with FakeServer(Script(on_answer=lambda *_: answer)) as server:
        async with Client(server.url) as client:
            with pytest.raises(ServerError, match="no completion in the answer"):
                await client.complete("/v1/completions", FIELDS)


async def test_nothing_listens() -> None:
    async with Client("http://127.0.0.1:9") as client:
        with pytest.raises(UnreachableError, match="cannot connect"):
            await client.complete("/v1/completions", FIELDS)


async def test_the_time_is_up() -> None:
    with FakeServer(Script(first_token_delay=5)) as server:
        async with Client(server.url, timeout=0.2) as client:
            with pytest.raises(UnreachableError, match=r"no answer within 0\.2 s"):
                await client.complete("/v1/completions", FIELDS)


def test_a_url_needs_its_scheme() -> None:
    with pytest.raises(BenchError, match="want http"):
        Client("localhost:8080")


async def test_requests_run_side_by_side() -> None:
    with FakeServer(Script(together=64)) as server:
        async with Client(server.url) as client:
            await asyncio.gather(*(client.complete("/v1/completions", FIELDS) for _ in range(64)))
        assert server.peak == 64
