"""Async plumbing: an answer that ends with its client, and several streams as one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from server.api.errors import ClientLeft

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Sequence

    from fastapi import Request

Item = TypeVar("Item")
Result = TypeVar("Result")


async def until_gone(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled when the client disconnects. Raises ClientLeft then.

    The request must have been read.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while not gone:
            gone = (await request.receive())["type"] == "http.disconnect"
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise ClientLeft from None
        raise
    finally:
        watcher.cancel()


async def merge(streams: Sequence[AsyncIterator[Item]]) -> AsyncIterator[tuple[int, Item | None]]:
    """Items of all streams as they come, each with its stream's index; None once a stream is exhausted.

    An exception in any stream ends them all.
    """
    if len(streams) == 1:  # nothing to merge, no tasks to pay for
        async for item in streams[0]:
            yield 0, item
        yield 0, None
        return
    queue: asyncio.Queue[tuple[int, Item | None] | Exception] = asyncio.Queue(len(streams))

    async def pump(index: int, stream: AsyncIterator[Item]) -> None:
        try:
            async for item in stream:
                await queue.put((index, item))
            await queue.put((index, None))
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            got = await queue.get()
            if isinstance(got, Exception):
                raise got
            running -= got[1] is None
            yield got
    finally:
        for task in tasks:
            task.cancel()
