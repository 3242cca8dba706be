"""Delivers tokens from the engine's thread to requests' listeners on their event loops."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from typing import TYPE_CHECKING

from qwen_serve.llamacpp import wake

from .errors import GenerationError
from .sequence import ANYBODY, DraftCounts

if TYPE_CHECKING:
    from collections.abc import Callable

    from .sampling import Logprobs
    from .sampling.thinking import ThinkingWatch
    from .sequence import CacheMiss, FinishReason, Progress, SchedulingParams, Timings


class Generation:
    """`async for tokens in generation` yields the tokens generated since the last iteration.

    The lists contain neither the end-of-generation token nor anything after it. They are never empty, except
    with `progress`: then an empty list means that more of the prompt has been read. A caller that stops
    listening must `cancel`. The iterator raises GenerationError if the engine or this sequence fails. There
    is one listener, on the event loop that submitted the request.
    """

    def __init__(
        self,
        prompt_tokens: int,
        timings: Timings,
        cancel: Callable[[Generation], None],
        *,
        image_tokens: int = 0,
        stream: bool = True,
        logprobs: Logprobs | None = None,
        thinking: ThinkingWatch | None = None,
        scheduling: SchedulingParams = ANYBODY,
        progress: Progress | None = None,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.image_tokens = image_tokens
        """Prompt tokens that are rows of pictures."""
        self.drafts = DraftCounts()
        """Drafted and accepted tokens."""
        self.cached_tokens = 0
        """Prompt tokens from the prefix cache."""
        self.missed: CacheMiss | None = None
        """Why the others were computed; None if there are none or it is not known yet."""
        self.timings = timings
        self.scheduling, self.progress = scheduling, progress
        self.logprobs = logprobs
        """Log-probabilities, if wanted: at least those of the tokens that have arrived."""
        self.thinking = thinking
        """Follows the answer's think block, if it has one; it has seen at least the tokens that arrived."""
        self.stream = stream
        """Whether tokens are delivered as they come, rather than all at the end. With log-probabilities some
        come earlier, so that these can be written while the device computes."""
        self.early = 0
        """Tokens delivered before the end without `stream`."""
        self.finish_reason: FinishReason | None = None
        """Known once the iterator is exhausted."""
        self._cancel = cancel
        self._arrived: list[int] = []
        self._done: FinishReason | Exception | None = None
        self._progressed = False
        self._waiter: asyncio.Future[None] | None = None

    def cancel(self) -> None:
        """End the generation: its slot is free within one step. Idempotent; does nothing after the end."""
        if self._done is None:
            self._cancel(self)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[int]:
        while not self._arrived:
            if self._progressed:
                self._progressed = False
                return []
            if isinstance(self._done, Exception):
                if isinstance(self._done, GenerationError):
                    raise type(self._done)(*self._done.args) from self._done
                raise GenerationError(str(self._done)) from self._done
            if self._done is not None:
                self.finish_reason = self._done
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        tokens, self._arrived = self._arrived, []
        return tokens

    def receive(self, tokens: list[int], done: FinishReason | Exception | None) -> None:
        """Receive a step's tokens. Called by the output queue, on the event loop."""
        self._arrived += tokens
        self._progressed = not tokens and done is None
        if done is not None and self._done is None:
            self._done = done
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
        self._pending: list[tuple[Generation, list[int], FinishReason | Exception | None]] = []
        self._flushed: deque[list[tuple[Generation, list[int], FinishReason | Exception | None]]] = deque()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        loop.add_reader(self._reader, self._deliver)

    def put(self, generation: Generation, tokens: list[int], done: FinishReason | Exception | None) -> None:
        """Add a result; the next `flush` delivers it."""
        self._pending.append((generation, tokens, done))

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
            for generation, tokens, done in self._flushed.popleft():
                generation.receive(tokens, done)

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
