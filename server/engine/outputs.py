"""The way of tokens from the engine's thread to whoever asked for them, on their event loop."""

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
    """`async for tokens in generation` yields what was generated since the last time it was asked.

    The lists hold neither the end-of-generation token nor anything after it, and are never empty, but where
    `progress` is wanted: an empty one says that more of the prompt has been read. A caller
    that stops listening must `cancel`. Raises GenerationError from the iterator when the engine, or this
    sequence in it, fails. One listener, on the event loop that submitted the request.
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
        """Those of them that are rows of pictures."""
        self.drafts = DraftCounts()
        """What became of draft tokens."""
        self.cached_tokens = 0
        """Prompt tokens that did not have to be computed."""
        self.missed: CacheMiss | None = None
        """Why the others had to be; None where none had, or that is not known yet."""
        self.timings = timings
        self.scheduling, self.progress = scheduling, progress
        self.logprobs = logprobs
        """What was asked for of the tokens beside them: at least that of those that have arrived."""
        self.thinking = thinking
        """Of an answer that begins in a think block: at least the thoughts that have arrived."""
        self.stream = stream
        """Tokens are delivered as they come, rather than all at the end."""
        self.finish_reason: FinishReason | None = None
        """Known once the iterator is exhausted."""
        self._cancel = cancel
        self._arrived: list[int] = []
        self._done: FinishReason | Exception | None = None
        self._progressed = False
        self._waiter: asyncio.Future[None] | None = None

    def cancel(self) -> None:
        """End the generation: its place is free within one step. Idempotent; harmless after the end."""
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
        """Take what a step produced. Called by the output queue, on the event loop."""
        self._arrived += tokens
        self._progressed = not tokens and done is None
        if done is not None and self._done is None:
            self._done = done
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class OutputQueue:
    """For one event loop, on whose thread it has to be made. `put` and `flush` are for the engine's thread.

    `loop.call_soon_threadsafe` writes to a socket, which releases the GIL; the loop's thread, just woken,
    takes it, and the engine waits while that thread writes to all its streams. Here the loop is woken through
    a pipe with the GIL held, and runs as soon as the engine calls into llama.cpp.
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
        """Add a result; it leaves with the next `flush`."""
        self._pending.append((generation, tokens, done))

    def flush(self) -> bool:
        """Deliver what was put so far; False when the loop is closed and nobody can listen any more."""
        if self._loop.is_closed() or self._writer < 0:
            return False
        if self._pending:
            pending, self._pending = self._pending, []
            self._flushed.append(pending)
            wake(self._writer)  # a full pipe wakes the loop all the same
        return True

    def _deliver(self) -> None:
        try:
            os.read(self._reader, 4096)
        except OSError:  # nobody wrote, or it was closed
            return
        while self._flushed:
            for generation, tokens, done in self._flushed.popleft():
                generation.receive(tokens, done)

    def close(self) -> None:
        """What was flushed still arrives, if the loop is open; nothing after. Idempotent."""
        if self._writer < 0:
            return
        os.close(self._writer)
        self._writer = -1
        try:
            self._loop.call_soon_threadsafe(self._close_reader)
        except RuntimeError:  # closed, its reader gone with it
            os.close(self._reader)

    def _close_reader(self) -> None:
        self._deliver()
        self._loop.remove_reader(self._reader)
        os.close(self._reader)
