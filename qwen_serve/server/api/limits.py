"""Limits on what all requests' bodies use together: memory, threads, and the time for large ones."""

from __future__ import annotations

import asyncio
import gc
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import TypeVar

from qwen_serve.server.api.errors import RETRY_AFTER_S, ApiError

Result = TypeVar("Result")

LARGE = 256 * 1024
"""A body of this many bytes is large. At most one large body is decoded at a time."""

_SMALL_WORK = ThreadPoolExecutor(4, "small-work")
_LARGE_WORK = ThreadPoolExecutor(1, "large-work")
PICTURE_WORK = ThreadPoolExecutor(4, "picture-work")
"""Threads for pictures. Without a GPU an encoding takes seconds, and text must not wait for it. Each thread
holds one picture of up to 100 MB, and then the tower's input, by default at most 50 MB."""
# not asyncio's own threads, since closing the loop would wait for those


_COUNTING = threading.Lock()
_resting = 0
"""Number of bodies for which garbage collection is paused."""


def stopped() -> ApiError:
    """The error for requests that the server's shutdown cuts short."""
    return ApiError(503, "the server stopped before the answer was complete", code="draining")


class Abandoned(Exception):
    """Raised in a thread whose result is no longer needed."""


class Bodies:
    """The bodies that one server holds, counted from their first byte until they have become prompts."""

    def __init__(self, limit: int) -> None:
        """At most `limit` bytes, of all bodies together."""
        self._limit = limit
        self._large = asyncio.Semaphore(1)
        self.held = 0
        self.closed = False
        """Whether work on bodies is to stop."""

    def begin(self) -> Body:
        """A count for one request; the caller releases it."""
        return Body(self)


class Body:
    """One request's share of the bytes counted."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self.size = self._held = 0
        """Bytes received, and how many of them are still counted."""
        self._alone = False
        self._resting = False

    def grow(self, size: int) -> None:
        """Counts `size` more bytes received. Raises ApiError 429 if there is no memory for them."""
        bodies = self._bodies
        if bodies.held + size > bodies._limit:
            raise ApiError(
                429,
                f"the bodies of all requests may take {bodies._limit // 2**20} MiB together "
                "(max_bodies_mib), and other requests' fill them; try again later",
                code="bodies_full",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        self.size += size
        self.hold(size)

    def hold(self, size: int) -> None:
        """Counts `size` more bytes, for objects made from a body."""
        self._bodies.held += size
        self._held += size

    @property
    def must_wait(self) -> bool:
        """Whether the body, now complete, has to wait for its turn to be decoded."""
        return self.size >= LARGE

    async def wait_turn(self) -> None:
        """Waits until no other large body is being worked on."""
        await self._bodies._large.acquire()
        self._alone = True

    def rest_collector(self) -> None:
        """Pauses garbage collection until the body is released. A collection would stop all threads to
        examine the body's many objects, none of which is garbage.

        With several such bodies, collection resumes when the last one is released.
        """
        global _resting
        with _COUNTING:
            _resting += not self._resting
            self._resting = True
            gc.disable()

    def release(self) -> None:
        """Stops counting the body, whose objects are no longer needed. Idempotent."""
        global _resting
        if self._resting:
            with _COUNTING:
                _resting -= 1
                self._resting = False
                if not _resting:
                    gc.enable()
        self._bodies.held -= self._held
        self._held = 0
        if self._alone:
            self._alone = False
            self._bodies._large.release()


async def in_thread(work: Callable[[], Result], size: int, pool: ThreadPoolExecutor | None = None) -> Result:
    """Runs `work()` for a body of `size` bytes on a thread of `pool` or, without one, of the pool for this
    size."""
    pool = pool or (_LARGE_WORK if size >= LARGE else _SMALL_WORK)
    return await asyncio.get_running_loop().run_in_executor(pool, copy_context().run, _freeing, work)


def _freeing(work: Callable[[], Result]) -> Result:
    """Runs `work()`. An exception gets no reference to the objects made from a body; otherwise the event loop
    would free all of them at once."""
    try:
        return work()
    except BaseException as error:
        seen: BaseException | None = error
        while seen is not None:
            traceback.clear_frames(seen.__traceback__)
            seen = seen.__cause__ or seen.__context__
        raise


async def interruptible(
    work: Callable[[Callable[[], None]], Result],
    size: int,
    bodies: Bodies,
    pool: ThreadPoolExecutor | None = None,
) -> Result:
    """Runs `work(interrupt)` like `in_thread`. `interrupt` raises Abandoned once the caller is cancelled, and
    ApiError 503 once the bodies are closed."""
    given_up = threading.Event()

    def interrupt() -> None:
        if given_up.is_set():
            raise Abandoned
        if bodies.closed:
            raise stopped()

    try:
        return await in_thread(partial(work, interrupt), size, pool)
    finally:
        given_up.set()
