"""Passing of tokens from the engine's thread to the event loop, and clients that stop listening."""

from __future__ import annotations

import asyncio
import threading

import pytest

from qwen_serve.server.engine import Generation, GenerationError, Timings
from qwen_serve.server.engine.outputs import OutputQueue


def generation() -> Generation:
    return Generation(1, Timings(), lambda _: None)


async def test_tokens_come_in_order_and_nobody_misses_one() -> None:
    queue = OutputQueue(asyncio.get_running_loop())
    listeners = [generation() for _ in range(3)]

    def engine() -> None:
        for step in range(200):
            for listener in listeners:
                queue.put(listener, [step], "length" if step == 199 else None)
            assert queue.flush()

    thread = threading.Thread(target=engine)
    thread.start()
    for listener in listeners:
        assert [token async for tokens in listener for token in tokens] == list(range(200))
    thread.join()
    queue.close()


async def test_nothing_leaves_before_it_is_flushed() -> None:
    queue = OutputQueue(asyncio.get_running_loop())
    listener = generation()
    queue.put(listener, [1], None)
    listening = asyncio.create_task(anext(listener))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(listening), 0.01)
    queue.put(listener, [2], "stop")
    assert queue.flush()
    assert await listening == [1, 2]
    queue.close()


async def test_what_was_flushed_arrives_though_the_queue_is_closed() -> None:
    queue = OutputQueue(asyncio.get_running_loop())
    listener = generation()
    queue.put(listener, [1], "stop")
    assert queue.flush()
    queue.close()
    queue.close()
    assert [tokens async for tokens in listener] == [[1]]
    assert not queue.flush()


def test_a_loop_that_is_closed_has_no_listeners() -> None:
    loop = asyncio.new_event_loop()
    queue = OutputQueue(loop)
    loop.close()
    assert not queue.flush()
    queue.close()


# --- the listener ------------------------------------------------------------------------------------------


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


async def test_what_has_ended_can_not_be_cancelled() -> None:
    cancelled: list[Generation] = []
    running = Generation(1, Timings(), cancelled.append)
    running.cancel()
    assert cancelled == [running]
    running.receive([1], "stop")
    running.cancel()
    assert cancelled == [running]
