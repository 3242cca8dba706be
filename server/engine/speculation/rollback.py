"""The way back from a wrong draft. There are two, and each step takes the one that suits it.

A recurrent state cannot drop its last tokens. So before drafts are verified, a spare sequence id, the slot's
holder, takes a share of the slot's cells; after a rejection the slot goes back to the holder's state, and the
tokens that were right are decoded once more with the next step. Neither way copies anything on the device,
and both touch only what the slot has gained since the holder was last brought up to date. But what was right
is decoded twice, and since the slot goes on in another cell for its state, llama.cpp builds its graph anew,
twice for each draft.

A sequence that decodes alone goes back to one of the context's snapshots instead, if its draft is short
enough: it keeps what was right, its cell and, with drafts of one length, its graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as ListLike

    from server.engine.llama import Context
    from server.engine.scheduler import Chunk


class Rollback:
    """Holders for the slots 0 to n - 1: the sequence ids from `first` on, which nobody else may use.

    Slots below `alone` may go back to snapshots: a copy of such a slot may then need a buffer of its own.
    """

    def __init__(self, context: Context, first: int, alone: int) -> None:
        self._context, self._first, self._alone = context, first, alone
        self._held: dict[int, int] = {}
        """Tokens of the holder's state, by slot."""
        self._by_snapshot = False

    def keeps_shape(self, slot: int, n_sequences: int) -> int:
        """Tokens of the longest draft after which a step of so many sequences needs no holder."""
        return self._context.n_snapshots if n_sequences == 1 and slot < self._alone else 0

    def prepare(self, chunks: ListLike[Chunk]) -> None:
        """Before a step with these is decoded: keep a way back for those that have drafts."""
        first = chunks[0]
        one_pass = len(chunks) == 1 and first.n_tokens <= self._context.n_ubatch
        self._by_snapshot = one_pass and len(first.draft) <= self.keeps_shape(_slot(first), 1)
        if not self._by_snapshot:
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
