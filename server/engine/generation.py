"""The caller's end of a request: tokens arrive here on the event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from .errors import GenerationError
from .speculation.counts import DraftCounts

if TYPE_CHECKING:
    from collections.abc import Callable

    from .sequence import FinishReason, Timings


class Generation:
    """`async for tokens in generation` yields what was generated since the last time it was asked.

    The lists hold neither the end-of-generation token nor anything after it, and are never empty. A caller
    that stops listening must `cancel`. Raises GenerationError from the iterator when the engine, or this
    sequence in it, fails. One listener, on the event loop that submitted the request.
    """

    def __init__(
        self,
        prompt_tokens: int,
        timings: Timings,
        cancel: Callable[[], None],
        drafts: DraftCounts | None = None,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.drafts = drafts or DraftCounts()
        """What became of tokens guessed ahead."""
        self.cached_tokens = 0
        """Prompt tokens that did not have to be computed."""
        self.timings = timings
        self.finish_reason: FinishReason | None = None
        """Known once the iterator is exhausted."""
        self.patient = False
        """Wake the listener at the end only, for one who can do nothing with less than everything."""
        self._cancel = cancel
        self._arrived: list[int] = []
        self._done: FinishReason | Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def cancel(self) -> None:
        """End the generation: its place is free within one step. Idempotent; harmless after the end."""
        if self._done is None:
            self._cancel()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[int]:
        while not self._arrived:
            if isinstance(self._done, Exception):
                raise GenerationError(str(self._done)) from self._done
            if self._done is not None:
                self.finish_reason = self._done
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        tokens, self._arrived = self._arrived, []
        return tokens

    def receive(self, tokens: list[int], done: FinishReason | Exception | None) -> None:
        """Take what a step produced. Called by the engine, on the event loop."""
        self._arrived += tokens
        if done is not None and self._done is None:
            self._done = done
        if self.patient and done is None:
            return
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
