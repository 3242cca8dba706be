"""Work that ends with its client, and work that is not interrupted by the collector."""

from __future__ import annotations

import asyncio
import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.requests import Request

from server.api.errors import ClientLeft
from server.api.request import until_gone, without_collection


def request(*messages: str) -> Request:
    """One whose client sends these types of messages, and then nothing."""
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


def test_the_collector_rests_until_the_last_of_several_has_ended() -> None:
    """A collection in the middle would look at all that a large body is made into, with everybody waiting."""
    seen = []

    def outer(_: None) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(without_collection, lambda _: None, None).result()
        seen.append(gc.isenabled())

    without_collection(outer, None)
    assert seen == [False]
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        without_collection(lambda one: one / 0, 1)
    assert gc.isenabled()
