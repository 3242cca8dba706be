"""Server-sent events, and streams whose client, server or engine stops."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_serve.server.api.errors import ApiError
from qwen_serve.server.api.sse import EventStream, EventWriter, encode, ending, event
from qwen_serve.server.engine import GenerationError
from tests.waiting import until

SCOPE: dict[str, Any] = {"type": "http", "method": "POST"}


class AsItIs(EventWriter):
    async def write(self, index: int, part: bytes | None) -> bytes:
        return part or b""

    async def end(self) -> bytes:
        return b"end"


class Client:
    """A client of a response: records what it gets, and may disconnect."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.leaves = asyncio.Event()
        self.closed = 0
        self.error: ApiError | None = None

    async def receive(self) -> dict[str, Any]:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.got.append(message)

    def close(self, error: ApiError | None) -> None:
        self.closed += 1
        self.error = error

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.got if "body" in message]

    async def follow(self, events: AsyncGenerator[bytes, None]) -> None:
        await EventStream([events], AsItIs(), self.close)(SCOPE, self.receive, self.send)


@given(text=st.text(), model=st.text())
def test_an_event_is_one_line_whatever_the_text(text: str, model: str) -> None:
    data = {"model": model, "choices": [{"index": 3, "delta": {"content": text}, "logprobs": None}]}
    written = event(data)
    assert written.decode().splitlines() == [f"data: {encode(data).decode()}", ""]
    assert json.loads(written.removeprefix(b"data: ")) == data


def test_the_end_is_one_piece() -> None:
    assert ending({"a": 1}, {"b": "é"}) == 'data: {"a":1}\n\ndata: {"b":"é"}\n\ndata: [DONE]\n\n'.encode()


async def test_events_are_sent_as_they_are() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"one"
        yield b"two"

    client = Client()
    await client.follow(events())
    start, *_, last = client.got
    assert start["status"] == 200
    assert (b"content-type", b"text/event-stream; charset=utf-8") in start["headers"]
    assert client.bodies == [b"one", b"two", b"end"]
    assert last["more_body"] is False
    assert client.closed == 1


async def test_a_long_wait_is_filled_with_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EventStream, "DEFAULT_PING_INTERVAL", 0.001)
    client = Client()

    async def events() -> AsyncGenerator[bytes, None]:
        await until(lambda: len(client.bodies) >= 2)
        yield b"late"

    await client.follow(events())
    pings = [one for one in client.bodies if one.startswith(b":")]
    assert all(ping.endswith(b"\n\n") for ping in pings)
    assert client.bodies[:2] == pings[:2]
    assert [one for one in client.bodies if one not in pings] == [b"late", b"end"]


async def test_a_client_that_leaves_ends_the_stream() -> None:
    client = Client()
    ended = False

    async def events() -> AsyncGenerator[bytes, None]:
        nonlocal ended
        try:
            yield b"one"
            client.leaves.set()
            await asyncio.Event().wait()
        finally:
            ended = True

    await client.follow(events())
    assert client.bodies == [b"one"], "no end: that is how the middleware knows"
    assert ended
    assert client.closed == 1


async def test_a_client_that_leaves_while_it_is_sent_to_ends_the_stream() -> None:
    client = Client()
    ended = False

    async def events() -> AsyncGenerator[bytes, None]:
        nonlocal ended
        try:
            yield b"one"
        finally:
            ended = True

    async def stuck(message: Any) -> None:
        if "body" in message:
            client.leaves.set()
            await asyncio.Event().wait()

    await EventStream([events()], AsItIs(), client.close)(SCOPE, client.receive, stuck)
    assert ended
    assert client.closed == 1


async def test_a_server_that_stops_ends_the_stream() -> None:
    client = Client()

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"one"
        await asyncio.Event().wait()

    task = asyncio.create_task(client.follow(events()))
    await until(lambda: client.bodies)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.closed == 1


async def test_a_failure_is_the_last_event() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"one"
        raise GenerationError("no memory slot")

    client = Client()
    await client.follow(events())
    one, failure = client.bodies
    assert one == b"one"
    assert json.loads(failure.removeprefix(b"data: "))["error"]["code"] == "generation_failed"
    assert client.got[-1]["more_body"] is False
    assert client.closed == 1
    assert client.error is not None
    assert client.error.code == "generation_failed"
