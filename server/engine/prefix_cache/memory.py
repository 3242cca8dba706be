"""What the cache asks of the place where sequences live."""

from __future__ import annotations

from typing import Any, Protocol


class Saved(Protocol):
    """A sequence's state in host memory."""

    @property
    def nbytes(self) -> int:
        """Its size."""
        ...


class Memory(Protocol):
    """Everything that belongs to a sequence id moves together: keys, values, states, a drafter's own."""

    def copy(self, source: int, target: int) -> None:
        """Make `target`, which is empty, the same sequence as `source`."""

    def remove(self, sequence: int) -> object:
        """Forget a sequence."""
        ...

    def save(self, sequence: int) -> Saved:
        """Copy a sequence to host memory."""
        ...

    def restore(self, sequence: int, saved: Any) -> None:
        """Put what `save` gave into an empty id. Raises LlamaError when there is no room."""
