"""What drafters have yet to read of prompts, and what becomes of sequence ids until then.

A chunk of a prompt that gives no token is not waited for: the next batch is launched behind it. What drafters
read would be the first to wait for it. So they read later: when a token has come and was sent off, when
nothing else is to be done, or before a batch that would write over it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from qwen_serve.llamacpp import Context
    from qwen_serve.server.engine.batch import Batch


class DeferredReads:
    """Calls that wait for the device, and whatever must come after them, in order.

    They read rows of `context`, which following batches leave alone for a while: on the host those that are
    further back than these batches are long, in the ring a window behind the newest.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._calls: deque[Callable[[], object]] = deque()
        self._batch_indices: list[int] = []
        """In the last batches, of the first row that is to be read on the host."""
        self._limits: dict[int, int] = {}
        """Slot -> length, in tokens, at which the ring overwrites rows that are still needed."""

    def __bool__(self) -> bool:
        return bool(self._calls)

    def put_off(self, read: Callable[[], object], batch_index: int | None = None) -> None:
        """Have a drafter read later, on the host from `batch_index` in the last batch on; `read` must not
        raise."""
        self._calls.append(read)
        if batch_index is not None:
            self._batch_indices.append(batch_index)

    def in_turn(self, call: Callable[[], object]) -> None:
        """Do something now, or if anything was put off after that; it must not raise."""
        if self._calls:
            self._calls.append(call)
        else:
            call()

    def copied(self, slot: int, length: int) -> None:
        """A copy of a slot with so many tokens is wanted, if anything was put off."""
        if self._calls and self._context.ring is not None:
            self._limits[slot] = length + self._context.ring.spare

    def freed(self, slot: int) -> None:
        """The next sequence in `slot` begins at the same place of the ring."""
        if slot in self._limits:
            self._limits[slot] = 0

    def spoiled_by(self, batch: Batch) -> bool:
        """Whether the batch, computed before, would write over what is to be read."""
        if not self._calls:
            return False
        first = min(self._batch_indices, default=None)
        if first is not None and not self._context.keeps_rows(first, batch.n_tokens, batch.n_rows):
            return True
        for chunk in batch.chunks:
            limit = self._limits.get(chunk.slot)
            if limit is None or (chunk.is_prompt and limit):  # of a prompt only its last window is read
                continue
            if chunk.start + chunk.n_tokens > limit:
                return True
        return False

    def clear_up(self) -> None:
        """Do it all. Waits for the device, if there is anything."""
        if self._calls:
            self._context.wait()  # drafters have streams of their own, which do not wait for the trunk's
        while self._calls:
            self._calls.popleft()()
        self._batch_indices.clear()
        self._limits.clear()
