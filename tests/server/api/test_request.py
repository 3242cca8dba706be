"""Work that ends when its client disconnects, and work that garbage collection does not interrupt."""

import asyncio
import gc
import json
import threading
import weakref
from typing import Any

import pytest
from starlette.requests import Request

from qwen_serve.server.api.context import RequestContext
from qwen_serve.server.api.errors import ApiError, ClientLeft
from qwen_serve.server.api.limits import Bodies, in_thread
from qwen_serve.server.api.request import MAX_KEYS, decode, until_gone
from tests.server.api.conftest import Start
from tests.waiting import wait_until


def request(*messages: str) -> Request:
    """A request whose client sends messages of these types, and then nothing."""
    left = list(messages)

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.Event().wait()
        return {"type": left.pop(0)}

    return Request({"type": "http"}, receive)


async def test_work_that_ends_first() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    assert await until_gone(request("http.request"), work()) == 7
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_failure_is_passed_on() -> None:
    async def work() -> None:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        await until_gone(request(), work())


async def test_a_client_that_leaves_cancels_the_work() -> None:
    cancelled = False

    async def work() -> None:
        nonlocal cancelled
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled = True
            raise

    with pytest.raises(ClientLeft):
        await until_gone(request("http.request", "http.disconnect"), work())
    assert cancelled
    await asyncio.sleep(0)  # the task itself goes on


async def test_a_server_that_stops_is_no_client_that_left() -> None:
    task = asyncio.create_task(until_gone(request(), asyncio.Event().wait()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_the_collector_rests_until_the_last_of_several_has_left() -> None:
    """A collection in the middle would traverse all objects of a large body while other requests wait."""
    bodies = Bodies(100)
    one, other = bodies.begin(), bodies.begin()
    for body in (one, other, one):
        body.rest_collector()
        assert not gc.isenabled()
    one.release()
    one.release()
    assert not gc.isenabled()
    other.release()
    assert gc.isenabled()


async def test_an_error_takes_nothing_along() -> None:
    """Its objects are freed on the thread, not all at once on the event loop."""

    class Body(list[int]):
        pass

    bodies: list[weakref.ref[Body]] = []

    def inner() -> None:
        body = Body()
        bodies.append(weakref.ref(body))
        raise KeyError("a")

    def work() -> None:
        body = Body()
        bodies.append(weakref.ref(body))
        try:
            inner()
        except KeyError as error:
            raise ValueError("b") from error

    with pytest.raises(ValueError, match="b") as caught:
        await in_thread(work, 0)
    assert caught.value.__cause__ is not None
    assert [body() for body in bodies] == [None, None]


MANY = 6000
LARGE_BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * MANY}]
    },
    "/v1/messages": {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * MANY}]},
    "/v1/messages/count_tokens": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * MANY}]
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": "x"},
            *[{"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"}] * MANY,
        ]
    },
    "/tokenize": {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * MANY}]},
}


@pytest.mark.parametrize("path", LARGE_BODIES)
def test_nobody_looks_for_garbage_in_a_large_body(start: Start, path: str) -> None:
    """A collection in the middle would block all threads for tens of milliseconds."""
    server = start("Hi", context_size=10**6)
    server.chat()
    seen: list[str] = []

    def collected(phase: str, _: Any) -> None:
        name = threading.current_thread().name
        if phase == "start" and ("large" in name or "small" in name):
            seen.append(name)

    gc.callbacks.append(collected)
    try:
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        assert server.post(path, **{limit: 1}, **LARGE_BODIES[path]).status_code == 200
    finally:
        gc.callbacks.remove(collected)
    assert not seen


@pytest.mark.parametrize("number", ["1e400", "-1e400", '[[0.5, {}], [1, {"a": [1e999]}]]'])
def test_a_number_that_is_too_large_is_found(number: str) -> None:
    with pytest.raises(ApiError, match=r"^b: a number is too large") as caught:
        decode(f'{{"a": [1.5, 2, {{"c": 1e300}}], "b": {number}}}'.encode())
    assert caught.value.param == "b"
    assert decode(b'{"a": [1, [2.5, {"b": [-1e300]}], {}], "c": null}')["c"] is None


@pytest.fixture(scope="module")
def _frozen() -> None:
    """Exclude objects of other tests from collection."""
    gc.collect()
    gc.freeze()


MARKED: dict[str, Any] = {"role": "x", "content": "Hi", "a mark": {}}


@pytest.mark.usefixtures("_frozen")
@pytest.mark.parametrize(
    ("path", "status", "fields"),
    [
        ("/v1/chat/completions", 400, {"messages": [MARKED]}),
        ("/v1/chat/completions", 400, {"messages": [{**MARKED, "role": "user"}], "echo": True}),
        ("/v1/chat/completions", 200, {"messages": [{**MARKED, "role": "tool"}]}),
        ("/v1/chat/completions", 200, {"messages": [{**MARKED, "role": "user"}]}),
        ("/v1/messages", 200, {"messages": [{**MARKED, "role": "user"}], "max_tokens": 9}),
        ("/v1/responses", 200, {"input": [{**MARKED, "role": "user"}]}),
        ("/v1/completions", 400, {"prompt": [MARKED], "max_tokens": 1}),
        ("/v1/messages", 400, {"messages": [MARKED], "max_tokens": 1}),
        ("/v1/responses", 400, {"input": [MARKED]}),
        ("/v1/responses", 400, {"input": [{**MARKED, "role": "user"}], "temperature": 1000}),
    ],
)
def test_a_body_is_freed_at_once(start: Start, path: str, status: int, fields: dict[str, Any]) -> None:
    """It does not wait for the garbage collector, which would free many bodies at once on any thread."""
    server = start("Hi")

    def marked() -> int:
        return sum(isinstance(found, dict) and "a mark" in found for found in gc.get_objects())

    assert server.post(path, **fields).status_code == status
    gc.collect()
    gc.disable()
    try:
        before = marked()
        for _ in range(3):
            assert server.post(path, **fields).status_code == status
        wait_until(lambda: marked() <= before)  # the server's thread may be about to let go
    finally:
        gc.enable()


@pytest.mark.usefixtures("_frozen")
@pytest.mark.parametrize("fields", [{}, {"temperature": -1}, {"prompt": [MARKED]}])
def test_a_requests_state_is_freed_with_it(start: Start, fields: dict[str, Any]) -> None:
    """There is no reference cycle between the scope and the context after the answer."""
    server = start("Hi")
    gc.collect()
    gc.disable()
    try:
        for path in ("/v1/completions", "/nothing", "/ping"):
            server.post(path, **{"prompt": "x", **fields})
        wait_until(lambda: not any(isinstance(found, RequestContext) for found in gc.get_objects()))
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "end", [b'":', b'" :', b'"\t\r\n:', b'\\\\":'], ids=["plain", "space", "blanks", "backslash"]
)
def test_keys_have_a_limit(end: bytes) -> None:
    """A key costs the event loop as much as several values."""
    many = b"{" + b",".join(b'"%d%s1' % (i, end) for i in range(MAX_KEYS + 100)) + b"}"
    with pytest.raises(ApiError, match=r"more than 131,072 keys"):
        decode(many)


@pytest.mark.parametrize(("digits", "count"), [(4290, 1900), (20, 380_000)])
def test_long_numbers_have_a_limit(digits: int, count: int) -> None:
    """They block the event loop for as long as ten times as many tokens."""
    numbers = b",".join([b"9" * digits] * count)
    with pytest.raises(ApiError, match=r"19 digits or more have more than 1,048,576 digits"):
        decode(b'{"prompt": [%s]}' % numbers)


@pytest.mark.parametrize("digits", [18, 4290])
def test_numbers_below_the_limit_are_read(digits: int) -> None:
    count = 1_000_000 // digits if digits > 18 else 400_000
    numbers = b",".join([b"9" * digits] * count)
    assert len(decode(b'{"prompt": [%s]}' % numbers)["prompt"]) == count


def test_what_looks_like_a_key_in_a_text_is_none() -> None:
    text = '{"a": 1, "b\\\\": ":"}\n' * MAX_KEYS
    assert decode(json.dumps({"prompt": text}).encode())["prompt"] == text
