"""Deferred reads: drafters read the hidden rows of prompt chunks later, and operations on sequence ids wait.

If a prompt chunk gives no token, the engine launches the next batch without waiting for the chunk. A drafter
that read the chunk's rows at once would wait for the device; that delayed the first token by 6.2%. So
drafters read later: after a token was sent, when there is nothing else to do, or before a batch that would
overwrite the rows.
"""

from collections import deque
from collections.abc import Callable

from qwen_serve.llamacpp import Context
from qwen_serve.server.engine.batch import Batch


class DeferredReads:
    """A queue of calls that wait for the device, and of calls that must follow them.

    The calls read rows of `context` that later batches have not overwritten. On the host a batch of n tokens
    overwrites the first n rows. The ring keeps a window of each sequence's newest rows.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._calls: deque[Callable[[], object]] = deque()
        self._batch_indices: list[int] = []
        """For each read on the host, the batch index of its first row."""
        self._limits: dict[int, int] = {}
        """Slot -> length, in tokens, at which the ring overwrites rows that are still needed."""

    def __bool__(self) -> bool:
        return bool(self._calls)

    def put_off(self, read: Callable[[], object], batch_index: int | None = None) -> None:
        """Queue a drafter's `read`, which must not raise. `batch_index`: the first row of the last batch that
        it reads on the host."""
        self._calls.append(read)
        if batch_index is not None:
            self._batch_indices.append(batch_index)

    def in_turn(self, call: Callable[[], object]) -> None:
        """Run `call` now, or after the queued calls if there are any; it must not raise."""
        if self._calls:
            self._calls.append(call)
        else:
            call()

    def copied(self, slot: int, length: int) -> None:
        """A slot with `length` tokens was copied: if reads are queued, they need its rows of the ring."""
        if self._calls and self._context.ring is not None:
            self._limits[slot] = length + self._context.ring.spare

    def freed(self, slot: int) -> None:
        """`slot` was freed: the next sequence in it overwrites its rows in the ring."""
        if slot in self._limits:
            self._limits[slot] = 0

    def spoiled_by(self, batch: Batch) -> bool:
        """Whether the batch would overwrite rows of queued reads if it were computed before them."""
        if not self._calls:
            return False
        first = min(self._batch_indices, default=None)
        if first is not None and not self._context.keeps_rows(first, batch.n_tokens, batch.n_rows):
            return True
        for chunk in batch.chunks:
            limit = self._limits.get(chunk.slot)
            if limit is None or (chunk.is_prompt and limit):  # of a prompt only the last window is read
                continue
            if chunk.start + chunk.n_tokens > limit:
                return True
        return False

    def clear_up(self) -> None:
        """Run all queued calls. Waits for the device if there are any."""
        if self._calls:
            self._context.wait()  # drafters have streams of their own, which do not wait for the trunk's
        while self._calls:
            self._calls.popleft()()
        self._batch_indices.clear()
        self._limits.clear()
