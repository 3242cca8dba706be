"""Delivers tokens from the engine's thread to requests' listeners on their event loops."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable

from qwen_serve.llamacpp import wake

from .errors import GenerationError
from .request import FinishReason, Request


class Generation:
    """A submitted request's handle. `async for tokens in generation` yields the tokens generated since the
    last iteration.

    The lists contain neither the end-of-generation token nor anything after it. They are never empty, except
    with `reports_progress`: then an empty list means that more of the prompt has been read. A caller that
    stops listening must `cancel`. The iterator raises GenerationError if the engine or this request fails.
    There is one listener, on the event loop that submitted the request.
    """

    def __init__(self, request: Request, queue: OutputQueue, cancel: Callable[[Request], None]) -> None:
        self.request = request
        """For the listener to read. It may be ahead of the tokens that arrived."""
        self.queue = queue
        self._cancel = cancel
        self._arrived: list[int] = []
        self._ended = self._progressed = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Known once the listener has all tokens; None if it failed."""
        done = self.request.done if self._ended and not self._arrived else None
        return None if isinstance(done, Exception) else done

    def cancel(self) -> None:
        """End the generation: its slot is free within one step. Idempotent; does nothing after the end."""
        if not self._ended:
            self._cancel(self.request)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[int]:
        while not self._arrived:
            if self._progressed:
                self._progressed = False
                return []
            if self._ended:
                done = self.request.done
                if isinstance(done, GenerationError):
                    raise type(done)(*done.args) from done
                if isinstance(done, Exception):
                    raise GenerationError(str(done)) from done
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        tokens, self._arrived = self._arrived, []
        return tokens

    def receive(self, tokens: list[int], *, ended: bool = False) -> None:
        """Receive a step's tokens. Called by the output queue, on the event loop."""
        self._arrived += tokens
        self._progressed, self._ended = not (tokens or ended), ended
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class OutputQueue:
    """Delivers results to one event loop. Construct it there; the engine's thread calls `put` and `flush`.

    `loop.call_soon_threadsafe` writes to a socket, which releases the GIL. The loop's thread wakes up and
    takes the GIL, and the engine waits while that thread writes to all its streams. This class wakes the loop
    through a pipe instead and keeps the GIL. The loop then runs when the engine calls into llama.cpp.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending: list[tuple[Generation, list[int], bool]] = []
        self._flushed: deque[list[tuple[Generation, list[int], bool]]] = deque()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        loop.add_reader(self._reader, self._deliver)

    def put(self, generation: Generation, tokens: list[int], *, ended: bool = False) -> None:
        """Add tokens; the next `flush` delivers them."""
        self._pending.append((generation, tokens, ended))

    def flush(self) -> bool:
        """Deliver all results put so far; return False if the loop is closed."""
        if self._loop.is_closed() or self._writer < 0:
            return False
        if self._pending:
            pending, self._pending = self._pending, []
            self._flushed.append(pending)
            wake(self._writer)  # a full pipe wakes the loop too
        return True

    def _deliver(self) -> None:
        try:
            os.read(self._reader, 4096)
        except OSError:  # empty or closed
            return
        while self._flushed:
            for generation, tokens, ended in self._flushed.popleft():
                generation.receive(tokens, ended=ended)

    def close(self) -> None:
        """Close the queue. Flushed results still arrive if the loop is open. Idempotent."""
        if self._writer < 0:
            return
        os.close(self._writer)
        self._writer = -1
        try:
            self._loop.call_soon_threadsafe(self._close_reader)
        except RuntimeError:  # the loop is closed and has dropped its reader
            os.close(self._reader)

    def _close_reader(self) -> None:
        self._deliver()
        self._loop.remove_reader(self._reader)
        os.close(self._reader)
