"""The prefix cache's view of sequence ids where a draft head reads along."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from server.engine.llama import Context

    from .speculator import Speculator


class DraftingMemory:
    """Copies and removes sequence ids in the trunk's context and, with it, what the draft head has of them.

    What is saved to the host leaves the head's part out: after a restore the head begins anew from there.
    """

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

    def save(self, sequence: int) -> npt.NDArray[np.uint8]:
        """Copy a sequence to host memory."""
        return self._context.save(sequence)

    def restore(self, sequence: int, saved: npt.NDArray[np.uint8]) -> None:
        """Put a saved sequence into an id. Raises LlamaError without room."""
        self._speculator.remove(sequence)
        self._context.restore(sequence, saved)
