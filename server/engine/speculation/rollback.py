"""The way back from a wrong draft: a checkpoint of a slot, kept up with what was accepted.

A recurrent state cannot drop its last tokens. So before drafts are verified, a spare sequence id, the slot's
holder, takes a share of the slot's cells; after a rejection the slot goes back to the holder's state, and the
tokens that were right are decoded once more with the next step. Neither way copies anything on the device,
and both touch only what the slot has gained since the holder was last brought up to date.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server.engine.llama import Context


class Rollback:
    """Holders for the slots 0 to n - 1: the sequence ids from `first` on, which nobody else may use."""

    def __init__(self, context: Context, first: int) -> None:
        self._context, self._first = context, first
        self._held: dict[int, int] = {}
        """Tokens of the checkpoint, by slot."""

    def save(self, slot: int, length: int) -> None:
        """Make the slot's state, `length` tokens, the one to go back to."""
        held = self._held.get(slot)
        if held == length:
            return
        # the recurrent part takes the slot's whole state, whatever the range; the KV part lacks the new cells
        self._context.copy(slot, self._first + slot, held or -1, -1)
        self._held[slot] = length

    def restore(self, slot: int) -> None:
        """Take the slot back to where it was saved."""
        length = self._held[slot]
        # an empty range of KV cells: only the recurrent state is shared, which then allows the removal
        self._context.copy(self._first + slot, slot, length, length)
        self._context.remove(slot, length)

    def held(self, slot: int) -> int:
        """Tokens of the slot's checkpoint."""
        return self._held[slot]

    def forget(self, slot: int) -> None:
        """The slot was emptied. Idempotent."""
        if self._held.pop(slot, None) is not None:
            self._context.remove(self._first + slot)
