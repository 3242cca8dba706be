"""Passing of tokens from the engine's thread to the event loop, and clients that stop listening."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from qwen_serve.server.engine import FinishReason, Generation, GenerationError
from qwen_serve.server.engine.outputs import OutputQueue
from qwen_serve.server.engine.request import Request


@pytest.fixture
async def queue() -> AsyncIterator[OutputQueue]:
    queue = OutputQueue(asyncio.get_running_loop())
    yield queue
    queue.close()


@pytest.fixture
async def running(queue: OutputQueue) -> Generation:
    return generation(queue)


def generation(queue: OutputQueue) -> Generation:
    return Generation(Request([0], 9), queue, lambda _: None)


def end(generation: Generation, done: FinishReason | Exception, tokens: list[int]) -> None:
    generation.request.done = done
    generation.receive(tokens, ended=True)


async def test_tokens_come_in_order_and_nobody_misses_one(queue: OutputQueue) -> None:
    listeners = [generation(queue) for _ in range(3)]

    def engine() -> None:
        for step in range(200):
            for listener in listeners:
                queue.put(listener, [step], ended=step == 199)
            assert queue.flush()

    thread = threading.Thread(target=engine)
    thread.start()
    for listener in listeners:
        assert [token async for tokens in listener for token in tokens] == list(range(200))
    thread.join()


async def test_nothing_leaves_before_it_is_flushed(queue: OutputQueue, running: Generation) -> None:
    queue.put(running, [1])
    listening = asyncio.create_task(anext(running))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(listening), 0.01)
    queue.put(running, [2], ended=True)
    assert queue.flush()
    assert await listening == [1, 2]


async def test_what_was_flushed_arrives_though_the_queue_is_closed(
    queue: OutputQueue, running: Generation
) -> None:
    queue.put(running, [1], ended=True)
    assert queue.flush()
    queue.close()
    queue.close()
    assert [tokens async for tokens in running] == [[1]]
    assert not queue.flush()


def test_a_loop_that_is_closed_has_no_listeners() -> None:
    loop = asyncio.new_event_loop()
    queue = OutputQueue(loop)
    loop.close()
    assert not queue.flush()
    queue.close()


# --- the listener ------------------------------------------------------------------------------------------


async def test_a_listener_that_waits_is_woken(running: Generation) -> None:
    listener = asyncio.create_task(anext(running))
    await asyncio.sleep(0)
    running.receive([1])
    running.receive([2, 3])  # before the listener had its turn
    assert await listener == [1, 2, 3]


async def test_what_comes_while_nobody_waits_comes_together(running: Generation) -> None:
    for token in range(3):
        running.receive([token])
    end(running, "length", [3])
    assert [tokens async for tokens in running] == [[0, 1, 2, 3]]
    assert running.finish_reason == "length"


async def test_the_end_comes_to_a_listener_that_waits(running: Generation) -> None:
    listener = asyncio.create_task(anext(running, None))
    await asyncio.sleep(0)
    end(running, "stop", [])
    assert await listener is None
    assert running.finish_reason == "stop"


async def test_a_failure_comes_after_what_was_generated(running: Generation) -> None:
    end(running, GenerationError("boom"), [1])
    assert await anext(running) == [1]
    with pytest.raises(GenerationError, match="boom"):
        await anext(running)


async def test_a_listener_that_was_cancelled_may_listen_again(running: Generation) -> None:
    listener = asyncio.create_task(anext(running))
    await asyncio.sleep(0)
    listener.cancel()
    with pytest.raises(asyncio.CancelledError):
        await listener
    running.receive([1])
    assert await anext(running) == [1]


async def test_what_has_ended_can_not_be_cancelled(queue: OutputQueue) -> None:
    cancelled: list[Request] = []
    running = Generation(Request([0], 9), queue, cancelled.append)
    running.cancel()
    assert cancelled == [running.request]
    end(running, "stop", [1])
    running.cancel()
    assert cancelled == [running.request]
