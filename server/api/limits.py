"""What the bodies of all requests may take together: memory, threads, and time of the one that is large."""

from __future__ import annotations

import asyncio
import gc
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from qwen_serve.server.api.errors import RETRY_AFTER_S, ApiError

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")

LARGE = 256 * 1024
"""Bytes from which on a body is large: no more than one such is there decoded at a time."""

_SMALL_WORK = ThreadPoolExecutor(4, "small-work")
_LARGE_WORK = ThreadPoolExecutor(1, "large-work")
PICTURE_WORK = ThreadPoolExecutor(4, "picture-work")
"""Text must not wait for pictures, which take seconds where no GPU encodes them. Each thread holds one, of up
to 100 MB."""
# not asyncio's own threads: the end of the loop would wait for those


_COUNTING = threading.Lock()
_resting = 0
"""Bodies for which the garbage collector rests."""


def stopped() -> ApiError:
    """What clients are told whose requests the end of the server cuts short."""
    return ApiError(503, "the server stopped before the answer was complete", code="draining")


class Abandoned(Exception):
    """Raised in a thread whose result nobody waits for."""


class Bodies:
    """The bodies that one server holds: counted from their first byte until they have become prompts."""

    def __init__(self, limit: int) -> None:
        """At most `limit` bytes, of all bodies together."""
        self._limit = limit
        self._large = asyncio.Semaphore(1)
        self.held = 0
        self.closed = False
        """Whether the work on bodies is to end."""

    def begin(self) -> Body:
        """For one request; to be released."""
        return Body(self)


class Body:
    """What one request holds of them."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self.size = self._held = 0
        """Bytes that have come, and those of them that are still counted."""
        self._alone = False
        self._resting = False

    def grow(self, size: int) -> None:
        """So many bytes more. Raises ApiError 429 where there is no memory for them."""
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
        """Count so many bytes more, of what was made of a body."""
        self._bodies.held += size
        self._held += size

    @property
    def must_wait(self) -> bool:
        """Whether the body, now complete, is decoded in its turn only."""
        return self.size >= LARGE

    async def wait_turn(self) -> None:
        """Until no other large body is being worked on."""
        await self._bodies._large.acquire()
        self._alone = True

    def rest_collector(self) -> None:
        """No look for garbage until the body is released: no other thread would run while its many objects
        are looked at, none of which is garbage.

        Of several at once, the last to end lets the collector go on.
        """
        global _resting
        with _COUNTING:
            _resting += not self._resting
            self._resting = True
            gc.disable()

    def release(self) -> None:
        """The body has become something smaller. May be called again."""
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
    """`work()` for a body of `size` bytes, on a thread, of a `pool` or of its size's."""
    pool = pool or (_LARGE_WORK if size >= LARGE else _SMALL_WORK)
    return await asyncio.get_running_loop().run_in_executor(pool, copy_context().run, _freeing, work)


def _freeing(work: Callable[[], Result]) -> Result:
    """`work()`. An error takes nothing along of what a body was made into: it would be freed on the event
    loop, all of it at once."""
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
    """`work(interrupt)` as `in_thread` does it; `interrupt` raises Abandoned once the caller was cancelled.

    And ApiError 503 once the bodies are closed.
    """
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
