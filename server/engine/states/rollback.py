"""Rollback of wrong drafts. There are three ways, and each step takes the one that suits it.

A recurrent state cannot drop its last tokens. So before drafts are verified, a spare sequence id, the slot's
rollback copy, takes a share of the slot's cells; after a rejection the slot goes back to that state, and the
tokens that were right are decoded once more with the next step. Nothing is copied on the device, and only
what the slot has gained since the copy was last brought up to date is touched. But the slot goes on in
another cell for its state, for which llama.cpp builds its graph anew, unless the draft was wrong.

A sequence that decodes alone on a GPU has its state copied instead, on the device, and copied back after a
rejection: it keeps its cell and, where all steps have as many rows, its graph, which would take longer to
build than the copy.

If its draft is so short that one of the context's snapshots (llama.cpp's `n_rs_seq`) is what it must go back
to, nothing is copied, and what was right need not be decoded twice.

Where every sequence id has cells of its own, sharing them would be a copy of all: states are copied on the
device, of every sequence that drafts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qwen_serve.server.engine.planning.sequence_ids import LONE_SLOTS

if TYPE_CHECKING:
    from qwen_serve.llamacpp import Context
    from qwen_serve.server.engine.batch import Batch, Chunk


class Rollback:
    """Rollback copies for the slots 0, 1...: the sequence ids `ids`, which nobody else may use.

    `device_copies` is the longest draft before which a lone sequence's state is copied on the device; 0 where
    building a graph takes less than that.
    """

    def __init__(self, context: Context, ids: range, *, device_copies: int = 0) -> None:
        self._context, self._ids, self._device_copies = context, ids, device_copies
        self._held: dict[int, int] = {}
        """Tokens of the rollback copy's state, by slot."""
        self._by_snapshot = self._by_device = False
        """Which way the step goes back."""
        self._always_by_device = not context.unified

    def rewinds(self, slot: int) -> int:
        """Tokens of the longest draft of which a step of this slot alone keeps what is right."""
        return self._context.n_snapshots if slot < LONE_SLOTS else 0

    def keeps_graph(self, slot: int) -> int:
        """Tokens of the longest draft of this slot alone that leaves llama.cpp's graph for the next one."""
        return max(self._device_copies, self._context.n_snapshots) if slot < LONE_SLOTS else 0

    def checkpoint(self, batch: Batch) -> None:
        """Before a batch is launched: keep what its drafts can be rolled back to. Raises LlamaError."""
        first = batch.chunks[0]
        slot, drafted = first.slot, len(first.draft)
        one_pass = len(batch.chunks) == 1 and first.n_tokens <= self._context.n_ubatch
        self._by_snapshot = one_pass and drafted <= self.rewinds(slot)
        self._by_device = one_pass and not self._by_snapshot and drafted <= self.keeps_graph(slot)
        if self._always_by_device and not self._by_snapshot:
            self._by_device = True
            for chunk in batch.chunks:
                if chunk.draft:
                    self._context.stash(chunk.slot)
        elif self._by_device:
            self._context.stash(slot)
        elif not self._by_snapshot:
            for chunk in batch.chunks:
                if chunk.draft:
                    self._hold(chunk)

    def reject(self, chunk: Chunk, accepted: int) -> int:
        """Only so many draft tokens were right: how many tokens the slot holds now. Raises LlamaError."""
        slot, position = chunk.slot, chunk.sequence.pictures.position
        if self._by_snapshot:
            kept = chunk.start + chunk.count + accepted
        elif self._by_device:
            kept = chunk.start
            self._context.unstash(slot)
        else:
            kept = self._held[slot]
            # an empty range of KV cells: only the recurrent state is shared, which then allows the removal
            self._context.copy(self._ids[slot], slot, position(kept), position(kept))
        self._context.remove(slot, position(kept))
        return kept

    def free(self, slot: int) -> None:
        """The slot was freed. Idempotent."""
        if self._held.pop(slot, None) is not None:
            self._context.remove(self._ids[slot])

    def _hold(self, chunk: Chunk) -> None:
        slot, length = chunk.slot, chunk.start
        held = self._held.get(slot)
        if held != length:
            # the recurrent part takes the whole state, whatever the range; the KV part lacks the new cells
            first = chunk.sequence.pictures.position(held) if held else -1
            self._context.copy(slot, self._ids[slot], first, -1)
            self._held[slot] = length
