"""The listener's end of a request."""

from __future__ import annotations

import asyncio

import pytest

from server.engine import Generation, GenerationError, Timings


def generation() -> Generation:
    return Generation(1, Timings(), lambda: None)


async def test_a_listener_that_waits_is_woken() -> None:
    running = generation()
    listener = asyncio.create_task(anext(running))
    await asyncio.sleep(0)
    running.receive([1], None)
    running.receive([2, 3], None)  # before the listener had its turn
    assert await listener == [1, 2, 3]


async def test_what_comes_while_nobody_waits_comes_together() -> None:
    running = generation()
    for token in range(3):
        running.receive([token], None)
    running.receive([3], "length")
    assert [tokens async for tokens in running] == [[0, 1, 2, 3]]
    assert running.finish_reason == "length"


async def test_who_is_patient_is_woken_once() -> None:
    running = generation()
    running.patient = True
    listener = asyncio.create_task(anext(running))
    await asyncio.sleep(0)
    for token in range(3):
        running.receive([token], None)
        await asyncio.sleep(0)
        assert not listener.done()
    running.receive([3], "stop")
    assert await listener == [0, 1, 2, 3]
    assert await anext(running, None) is None
    assert running.finish_reason == "stop"


async def test_who_is_patient_is_told_of_a_failure() -> None:
    running = generation()
    running.patient = True
    listener = asyncio.create_task(anext(running))
    await asyncio.sleep(0)
    running.receive([], GenerationError("boom"))
    with pytest.raises(GenerationError, match="boom"):
        await listener


async def test_the_end_comes_to_a_listener_that_waits() -> None:
    running = generation()
    listener = asyncio.create_task(anext(running, None))
    await asyncio.sleep(0)
    running.receive([], "stop")
    assert await listener is None
    running.receive([5], None)  # late, and nobody's
    assert running.finish_reason == "stop"


async def test_a_failure_comes_after_what_was_generated() -> None:
    running = generation()
    running.receive([1], GenerationError("boom"))
    assert await anext(running) == [1]
    with pytest.raises(GenerationError, match="boom"):
        await anext(running)


async def test_a_listener_that_was_cancelled_may_listen_again() -> None:
    running = generation()
    listener = asyncio.create_task(anext(running))
    await asyncio.sleep(0)
    listener.cancel()
    with pytest.raises(asyncio.CancelledError):
        await listener
    running.receive([1], None)
    assert await anext(running) == [1]
