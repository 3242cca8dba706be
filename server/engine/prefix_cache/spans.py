"""Which KV cells are occupied, when sequences share them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(slots=True, eq=False)
class _Span:
    """Cells with the same owners, in the order of their tokens."""

    cells: list[int] = field(default_factory=list)
    owners: int = 0
    running: int = 0
    """Owners that are slots."""
    extent: int = 0
    """Cells of the cache up to the highest of these."""


class Spans:
    """A mirror of a unified KV cache, which tells cell by cell what llama.cpp does not (llama-kv-cells.h).

    A sequence is a chain of spans. Copying one shares its chain; what is appended afterwards is its own. So
    a span is never shared in part, and counting owners is exact. New tokens take the lowest free cells:
    `find_slot` (llama-kv-cache.cpp) searches from a head that never lies above a free cell. Ids below `slots`
    run requests, those above hold checkpoints.
    """

    def __init__(self, slots: int, cells: int) -> None:
        self._slots = slots
        self._chains: dict[int, list[_Span]] = {}
        self._free = np.ones(cells, bool)
        self._head = 0  # no free cell lies below
        self._extent = 0
        self.used = 0
        """Distinct cells, all sequences together."""
        self.idle = 0
        """Those among them that no running sequence shares: what giving up checkpoints can free."""

    @property
    def extent(self) -> int:
        """Cells up to the highest occupied one: what attention reads in every step."""
        if self._extent and self._free[self._extent - 1]:
            occupied = np.flatnonzero(~self._free[: self._extent])
            self._extent = int(occupied[-1]) + 1 if occupied.size else 0
        return self._extent

    def length(self, sequence: int) -> int:
        """Cells of one sequence, shared or not."""
        return sum(len(span.cells) for span in self._chains.get(sequence, ()))

    def append(self, sequence: int, count: int) -> None:
        """So many tokens were decoded, or restored, behind those of a sequence."""
        if count:
            self._extend(sequence, self._take(count).tolist())

    def append_batch(self, sequences: npt.NDArray[np.int32]) -> None:
        """A batch was decoded: the sequence of each of its tokens, in the batch's order."""
        cells, ids = self._take(len(sequences)), sequences.tolist()
        distinct = dict.fromkeys(ids)
        if len(distinct) == len(ids):
            for sequence, cell in zip(ids, cells.tolist(), strict=True):
                self._extend(sequence, [cell])
        else:
            for sequence in distinct:
                self._extend(sequence, cells[sequences == sequence].tolist())

    def share(self, source: int, target: int) -> None:
        """`source` was copied to `target`, which must be empty. Raises ValueError when it is not."""
        if self._chains.get(target):
            raise ValueError(f"sequence {target} is not empty")
        chain = self._chains[target] = list(self._chains.get(source, ()))
        for span in chain:
            self._own(target, span)

    def truncate(self, sequence: int, length: int) -> None:
        """Take back what a slot appended beyond `length`. Raises ValueError when others share that."""
        chain = self._chains[sequence]
        surplus = self.length(sequence) - length
        while surplus > 0:
            span = chain[-1]
            if span.owners > 1:
                raise ValueError(f"cells beyond {length} of sequence {sequence} are shared")
            kept = max(0, len(span.cells) - surplus)
            gone, span.cells = span.cells[kept:], span.cells[:kept]
            span.extent = max(span.cells, default=-1) + 1
            surplus -= len(gone)
            if not span.running:
                self.idle -= len(gone)
            self._give_back(gone)
            if not span.cells:
                chain.pop()

    def drop(self, sequence: int) -> None:
        """A sequence was removed."""
        for span in self._chains.pop(sequence, ()):
            span.owners -= 1
            if sequence < self._slots:
                span.running -= 1
                if not span.running:
                    self.idle += len(span.cells)
            if not span.owners:
                self.idle -= len(span.cells)
                self._give_back(span.cells)

    def exclusive(self, sequence: int) -> int:
        """Cells that would be free if this sequence went."""
        return sum(len(span.cells) for span in self._chains.get(sequence, ()) if span.owners == 1)

    def idle_in(self, sequence: int) -> int:
        """Cells of this sequence that no running one shares."""
        return sum(len(span.cells) for span in self._chains.get(sequence, ()) if not span.running)

    def idle_extent(self, sequence: int) -> int:
        """Cells up to the highest of those; 0 when there are none."""
        chain = self._chains.get(sequence, ())
        return max((span.extent for span in chain if not span.running), default=0)

    def _take(self, count: int) -> npt.NDArray[np.intp]:
        """The lowest free cells. Raises ValueError when there are not as many."""
        next_to_each_other = self._free[self._head : self._head + count]
        if len(next_to_each_other) == count and next_to_each_other.all():  # most often, while others decode
            return self._occupy(np.arange(self._head, self._head + count))
        window = 1024
        while True:
            free = np.flatnonzero(self._free[self._head : self._head + window])
            if len(free) >= count:
                break
            if self._head + window >= len(self._free):
                raise ValueError(f"{count} cells are wanted, {len(free)} are free")
            window *= 8
        return self._occupy(free[:count] + self._head)

    def _occupy(self, cells: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        self._free[cells] = False
        self.used += len(cells)
        self._head = int(cells[-1]) + 1
        self._extent = max(self._extent, self._head)
        return cells

    def _give_back(self, cells: list[int]) -> None:
        self._free[cells] = True
        self.used -= len(cells)
        self._head = min(self._head, min(cells, default=self._head))

    def _extend(self, sequence: int, cells: list[int]) -> None:
        chain = self._chains.setdefault(sequence, [])
        if not chain or chain[-1].owners > 1:
            chain.append(_Span())
            self._own(sequence, chain[-1])
        chain[-1].cells += cells
        chain[-1].extent = max(chain[-1].extent, cells[-1] + 1)
        if sequence >= self._slots:
            self.idle += len(cells)

    def _own(self, sequence: int, span: _Span) -> None:
        span.owners += 1
        if sequence < self._slots:
            if not span.running and span.owners > 1:
                self.idle -= len(span.cells)
            span.running += 1
