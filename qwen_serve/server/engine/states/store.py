"""The one owner of llama.cpp's sequence ids and of drafters' states, so that they move together."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from .cells import CellAllocator, StreamCells
from .deferred_reads import DeferredReads
from .rollback import Rollback

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from qwen_serve.llamacpp import Context
    from qwen_serve.server.engine.batch import Batch, Chunk
    from qwen_serve.server.engine.speculation.hidden import HiddenDrafter, SavedDraftCache

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SavedState:
    """A sequence in host memory: the trunk's keys, values and recurrent states, and drafters' states."""

    trunk: npt.NDArray[np.uint8]
    drafters: tuple[SavedDraftCache | None, ...]
    """One for each of the store's `hidden_drafters`; None if it had no state."""
    length: int
    """Tokens."""

    @property
    def nbytes(self) -> int:
        return self.trunk.nbytes + sum(saved.nbytes for saved in self.drafters if saved is not None)


class StateStore:
    """Slots run requests, rollback copies undo drafts, and checkpoints belong to the prefix cache.

    Ids from 0 on: first `slots` slots, then `rollback`, then the checkpoints. Engine's thread only.
    """

    def __init__(self, context: Context, slots: int, rollback: range, *, device_copies: int = 0) -> None:
        self.cells = (CellAllocator if context.unified else StreamCells)(slots, context.n_ctx)
        self.hidden_drafters: list[HiddenDrafter] = []
        """Each has a state for each sequence id, which is copied, freed and saved together with the trunk's.
        If such a state is lost, only time is lost."""
        self.deferred = DeferredReads(context)
        """Deferred reads of `hidden_drafters`, and calls that must follow them."""
        self._context = context
        self._rollback = Rollback(context, rollback, device_copies=device_copies)

    def length(self, sequence: int) -> int:
        """Number of tokens that an id holds."""
        return self.cells.length(sequence)

    def copy(self, source: int, target: int) -> None:
        """Make `target`, which is empty, a copy of `source` that shares its cells and state."""
        self._context.copy(source, target)
        self.cells.share(source, target)
        self.deferred.copied(source, self.length(source))
        for drafter in self.hidden_drafters:
            self.deferred.in_turn(partial(self._copy_reading, drafter, source, target))

    def free(self, sequence: int) -> None:
        """Empty an id: its cells, its state, its rollback copy and drafters' states. Idempotent."""
        self._rollback.free(sequence)
        self._context.remove(sequence)
        self.cells.drop(sequence)
        self.deferred.freed(sequence)
        for drafter in self.hidden_drafters:
            self.deferred.in_turn(partial(self._free_reading, drafter, sequence))

    def clear(self) -> None:
        """Empty all ids and clear the contents of their cells. Waits for the device."""
        self.deferred.clear_up()
        self._context.wait()
        self._context.clear(data=True)
        for drafter in self.hidden_drafters:
            drafter.clear()

    def save(self, sequence: int) -> SavedState:
        """Copy a sequence to host memory. Waits for the device. Raises LlamaError."""
        self.deferred.clear_up()
        saved = tuple(self._save_reading(drafter, sequence) for drafter in self.hidden_drafters)
        return SavedState(self._context.save(sequence), saved, self.length(sequence))

    def restore(self, sequence: int, saved: SavedState) -> None:
        """Restore a saved sequence to an empty id. If there is no room, raises LlamaError and leaves the id
        empty."""
        self.deferred.clear_up()
        try:
            self._context.restore(sequence, saved.trunk)
        except Exception:
            self._context.remove(sequence)
            raise
        self.cells.append(sequence, saved.length)
        for drafter, part in zip(self.hidden_drafters, saved.drafters, strict=True):
            if part is not None:
                try:
                    drafter.restore(sequence, part)
                except Exception as error:
                    self._lost(drafter, sequence, error)

    # --- drafts --------------------------------------------------------------------------------------------

    def rewinds(self, slot: int, *, alone: bool = True) -> int:
        """Longest draft, in a step of this slot alone or of several, whose accepted tokens need not be
        decoded again."""
        return self._rollback.rewinds(slot, alone=alone)

    def longest_draft(self, chunk: Chunk) -> int:
        """Longest draft of a chunk that can be taken back."""
        return self._rollback.longest(chunk)

    def checkpoint(self, batch: Batch) -> None:
        """Keep the states that a batch's drafts may roll back to; call this before the batch is launched.
        Raises LlamaError."""
        self._rollback.checkpoint(batch)

    def rollback(self, chunk: Chunk, accepted: int) -> int:
        """Roll a slot back after `accepted` tokens of its draft; return the tokens that it holds now.

        If that is `chunk.start`, accepted tokens must be decoded again. Raises LlamaError.
        """
        kept = self._rollback.reject(chunk, accepted)
        self.cells.truncate(chunk.slot, kept)
        return kept

    # --- drafters' states: an error in one is not raised ----------------------------------------------------

    def _copy_reading(self, drafter: HiddenDrafter, source: int, target: int) -> None:
        try:
            drafter.copy(source, target)
        except Exception as error:
            self._lost(drafter, target, error)

    def _save_reading(self, drafter: HiddenDrafter, sequence: int) -> SavedDraftCache | None:
        try:
            return drafter.save(sequence)
        except Exception as error:
            self._lost(drafter, sequence, error)
            return None

    def _free_reading(self, drafter: HiddenDrafter, sequence: int) -> None:
        try:
            drafter.free(sequence)
        except Exception as error:  # the drafter's state and drafts may be wrong from now on
            drafter.lost += 1
            log.warning("%s could not free sequence %d: %s", type(drafter).__name__, sequence, error)

    def _lost(self, drafter: HiddenDrafter, sequence: int, error: Exception) -> None:
        drafter.lost += 1
        log.warning("%s of sequence %d is lost: %s", type(drafter).__name__, sequence, error)
        self._free_reading(drafter, sequence)
