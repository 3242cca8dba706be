"""The way back from a wrong draft. There are three, and each step takes the one that suits it.

A recurrent state cannot drop its last tokens. So before drafts are verified, a spare sequence id, the slot's
holder, takes a share of the slot's cells; after a rejection the slot goes back to the holder's state, and the
tokens that were right are decoded once more with the next step. Nothing is copied on the device, and only
what the slot has gained since the holder was last brought up to date is touched. But the slot goes on in
another cell for its state, for which llama.cpp builds its graph anew, unless the draft was wrong.

A sequence that decodes alone, and drafts again and again, has its state copied instead, on the device, and
copied back after a rejection: it keeps its cell and, where all steps have as many rows, its graph.

If its draft is so short that one of the context's snapshots is what it must go back to, nothing is copied,
and what was right need not be decoded twice.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from .times import Mean

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as ListLike

    from server.engine.llama import Context
    from server.engine.scheduler import Chunk

    from .times import StepTimes


class Rollback:
    """Holders for the slots 0 to n - 1: the sequence ids from `first` on, which nobody else may use.

    Slots below `alone` may go back to snapshots, or to copies for drafts of at most `copied` tokens, unless
    `times` tell that to build a graph takes less: each of them may need a buffer for another state.
    """

    def __init__(
        self,
        context: Context,
        times: StepTimes,
        first: int,
        alone: int,
        *,
        copied: int = 0,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._context, self._times = context, times
        self._first, self._alone, self._copied = first, alone, copied
        self._clock, self._copying = clock, Mean()
        self._held: dict[int, int] = {}
        """Tokens of the holder's state, by slot."""
        self._by_snapshot = self._by_copy = False
        """Which way the step goes back."""

    def undoes(self, slot: int, n_sequences: int) -> int:
        """Tokens of the longest draft of which a step of so many sequences keeps what is right."""
        return self._context.n_snapshots if n_sequences == 1 and slot < self._alone else 0

    def keeps_shape(self, slot: int, n_sequences: int) -> int:
        """Tokens of the longest draft that leaves a graph for the next one."""
        if n_sequences > 1 or slot >= self._alone:
            return 0
        # to the holder it takes another graph
        copied = self._copied if self._copying.value <= self._times.building.value else 0
        return max(copied, self._context.n_snapshots)

    def prepare(self, chunks: ListLike[Chunk]) -> None:
        """Before a step with these is decoded: keep a way back for those that have drafts."""
        first = chunks[0]
        slot, drafted = _slot(first), len(first.draft)
        one_pass = len(chunks) == 1 and first.n_tokens <= self._context.n_ubatch
        self._by_snapshot = one_pass and drafted <= self.undoes(slot, 1)
        self._by_copy = one_pass and not self._by_snapshot and drafted <= self.keeps_shape(slot, 1)
        if self._by_copy:
            started = self._clock()
            self._context.stash(slot)
            self._copying.add(self._clock() - started)
        elif not self._by_snapshot:
            for chunk in chunks:
                if chunk.draft:
                    self._hold(_slot(chunk), chunk.sequence.cached)

    def reject(self, chunk: Chunk, start: int, accepted: int) -> int:
        """Of a draft in the last step, only so many tokens were right: how many the slot holds now.

        `start` is what it held before the step.
        """
        slot = _slot(chunk)
        if self._by_snapshot:
            kept = start + chunk.count + accepted
        elif self._by_copy:
            kept = start
            self._context.unstash(slot)
        else:
            kept = self._held[slot]
            # an empty range of KV cells: only the recurrent state is shared, which then allows the removal
            self._context.copy(self._first + slot, slot, kept, kept)
        self._context.remove(slot, kept)
        return kept

    def forget(self, slot: int) -> None:
        """The slot was emptied. Idempotent."""
        if self._held.pop(slot, None) is not None:
            self._context.remove(self._first + slot)

    def _hold(self, slot: int, length: int) -> None:
        held = self._held.get(slot)
        if held != length:
            # the recurrent part takes the whole state, whatever the range; the KV part lacks the new cells
            self._context.copy(slot, self._first + slot, held or -1, -1)
            self._held[slot] = length


def _slot(chunk: Chunk) -> int:
    assert chunk.sequence.slot is not None
    return chunk.sequence.slot
