"""Rollback of rejected drafts. A recurrent state cannot drop its last tokens, so a step uses one of these
ways:

- Operands, if the context keeps them and the draft is no longer than they reach: llama.cpp leaves the state
  as it is until it knows which tokens were accepted. Nothing is copied, no tokens are decoded again, and any
  sequence may draft.
- Rollback copy: before drafts are verified, a spare sequence id, the slot's rollback copy, shares the slot's
  cells. After a rejection the slot returns to the copy's state, and the accepted tokens are decoded again in
  the next step. Nothing is copied on the device, and updating the copy touches only the tokens added since
  its last update. But if the draft was right, the slot's state moves to another cell, and llama.cpp builds
  its graph again.
- Device copy, for a sequence that decodes alone on a GPU: the state is copied on the device, and copied back
  after a rejection. The state keeps its cell. If all steps have the same number of rows, llama.cpp keeps its
  graph, which takes longer to build than the copy.
- Snapshot, if the draft is no longer than the context's snapshots (llama.cpp's `n_rs_seq`) reach: nothing is
  copied, and accepted tokens are not decoded again.

If every sequence id has cells of its own, sharing cells would copy them all. Then each sequence that drafts
uses a device copy, unless a snapshot reaches far enough.
"""

from qwen_serve.llamacpp import Context
from qwen_serve.llamacpp.errors import LlamaError
from qwen_serve.server.engine.batch import Batch, Chunk
from qwen_serve.server.engine.planning.sequence_ids import LONE_SLOTS


class Rollback:
    """Keeps and restores the states of slots. `ids` are the sequence ids of the rollback copies, one a slot.

    `device_copies` is the longest draft for which a lone sequence's state is copied on the device; 0 if
    building a graph takes less time than the copy.
    """

    def __init__(self, context: Context, ids: range, *, device_copies: int = 0) -> None:
        self._context, self._ids, self._device_copies = context, ids, device_copies
        self._held: dict[int, int] = {}
        """Slot -> tokens that its rollback copy holds."""
        self._by_snapshot = self._by_device = False
        """How this step rolls back; by rollback copies if neither is set."""
        self._by_operands: frozenset[int] = frozenset()
        """Slots that roll back by operands in this step, whatever the others do."""
        self._always_by_device = not context.unified

    def rewinds(self, slot: int, *, alone: bool = True) -> int:
        """Longest draft, in a step of this slot alone or of several, whose accepted tokens need not be
        decoded again."""
        return max(self._context.n_operands - 1, self._snapshots(slot) if alone else 0, 0)

    def longest(self, chunk: Chunk) -> int:
        """Longest draft of a chunk that can be taken back."""
        if chunk.slot < len(self._ids) or self._always_by_device:
            return chunk.sequence.limit
        return max(0, self._context.n_operands - chunk.count)

    def keeps_graph(self, slot: int) -> int:
        """Longest draft, in a step of this slot alone, after which llama.cpp can reuse its graph."""
        return max(self._device_copies if slot < LONE_SLOTS else 0, self.rewinds(slot))

    def checkpoint(self, batch: Batch) -> None:
        """Keep the states that a batch's drafts may roll back to; call this before the batch is launched.
        Raises LlamaError."""
        self._by_operands = self._kept_by_operands(batch)
        first = batch.chunks[0]
        slot, drafted = first.slot, len(first.draft)
        one_pass = len(batch.chunks) == 1 and first.n_tokens <= self._context.n_ubatch
        self._by_snapshot = one_pass and drafted <= self._snapshots(slot)
        self._by_device = one_pass and not self._by_snapshot and drafted <= self.keeps_graph(slot)
        if self._always_by_device and not self._by_snapshot:
            self._by_device = True
            for chunk in batch.chunks:
                if chunk.draft and chunk.slot not in self._by_operands:
                    self._context.save_on_device(chunk.slot)
        elif self._by_device and slot not in self._by_operands:
            self._context.save_on_device(slot)
        elif not self._by_snapshot:
            for chunk in batch.chunks:
                if chunk.draft and chunk.slot not in self._by_operands:
                    self._hold(chunk)

    def reject(self, chunk: Chunk, accepted: int) -> int:
        """Roll back to `accepted` draft tokens; return how many tokens the slot holds. Raises LlamaError."""
        slot, position = chunk.slot, chunk.sequence.pictures.position
        if self._by_snapshot or slot in self._by_operands:
            kept = chunk.start + chunk.count + accepted
        elif self._by_device:
            kept = chunk.start
            self._context.restore_on_device(slot)
        else:
            kept = self._held[slot]
            # an empty range of KV cells: only the recurrent state is shared, so that the cells can be removed
            self._context.copy(self._ids[slot], slot, position(kept), position(kept))
        if not self._context.remove(slot, position(kept)):
            raise LlamaError(f"the draft of slot {slot} cannot be taken back")
        return kept

    def free(self, slot: int) -> None:
        """Free the slot's rollback copy. Idempotent."""
        if self._held.pop(slot, None) is not None:
            self._context.remove(self._ids[slot])

    def _snapshots(self, slot: int) -> int:
        return self._context.n_snapshots if slot < LONE_SLOTS else 0

    def _kept_by_operands(self, batch: Batch) -> frozenset[int]:
        """llama.cpp takes every chunk with a few tokens and rows for a verification. If these are more than
        it has room for, it folds some before they are checked."""
        kept = [
            one.slot for one in batch.chunks if one.n_rows > 1 and one.n_tokens <= self._context.n_operands
        ]
        return frozenset(kept if len(kept) <= self._context.operand_sequences else ())

    def _hold(self, chunk: Chunk) -> None:
        slot, length = chunk.slot, chunk.start
        held = self._held.get(slot)
        if held != length:
            # the recurrent part copies the whole state for any range; the KV part only lacks the new cells
            first = chunk.sequence.pictures.position(held) if held else -1
            self._context.copy(slot, self._ids[slot], first, -1)
            self._held[slot] = length
