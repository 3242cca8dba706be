"""The prefix cache's view of sequence ids where a draft head reads along."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from server.engine.llama import Context

    from .mtp import SavedReading
    from .speculator import Speculator


@dataclass(frozen=True, slots=True)
class SavedSequence:
    """A sequence in host memory: the trunk's keys, values and states, and what the draft head had of it."""

    trunk: npt.NDArray[np.uint8]
    head: SavedReading | None

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.trunk.nbytes + (0 if self.head is None else self.head.nbytes)


class DraftingMemory:
    """Copies, removes and saves sequence ids in the trunk's context and what the draft head has of them."""

    def __init__(self, context: Context, speculator: Speculator) -> None:
        self._context, self._speculator = context, speculator

    def copy(self, source: int, target: int) -> None:
        """`target` becomes what `source` is."""
        self._context.copy(source, target)
        self._speculator.copy(source, target)

    def remove(self, sequence: int) -> None:
        """Empty an id."""
        self._context.remove(sequence)
        self._speculator.remove(sequence)

    def save(self, sequence: int) -> SavedSequence:
        """Copy a sequence to host memory."""
        return SavedSequence(self._context.save(sequence), self._speculator.save(sequence))

    def restore(self, sequence: int, saved: SavedSequence) -> None:
        """Put a saved sequence into an id. Raises LlamaError without room in the trunk's context."""
        self._context.restore(sequence, saved.trunk)
        self._speculator.restore(sequence, saved.head)
