"""How many KV cells are in use, when sequences share them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Segment:
    """Neighbouring cells of a sequence that have the same owners."""

    length: int
    owners: int = 0
    running: int = 0
    """Owners that are slots."""


class CellAllocator:
    """Counts the cells of a unified KV cache (llama-kv-cells.h), one a token, as llama.cpp shares them.

    A sequence is a chain of segments. Copying one shares its chain; what is appended afterwards is its own.
    So a segment is never shared in part, and counting owners is exact. Ids below `slots` run requests, those
    from there on hold checkpoints.
    """

    def __init__(self, slots: int, total: int) -> None:
        self.total = total
        self.used = 0
        """Distinct cells, all sequences together."""
        self.idle = 0
        """Those among them that no running sequence shares: what evicting checkpoints can free."""
        self._slots = slots
        self._chains: dict[int, list[_Segment]] = {}

    @property
    def free(self) -> int:
        return self.total - self.used

    @property
    def available(self) -> int:
        """Cells that running sequences do not use: those that are free, and those that can be freed."""
        return self.free + self.idle

    def length(self, sequence: int) -> int:
        """Cells of one sequence, shared or not."""
        return sum(segment.length for segment in self._chains.get(sequence, ()))

    def append(self, sequence: int, count: int) -> None:
        """So many tokens come behind those of a sequence. Raises ValueError without as many cells."""
        if count > self.free:
            raise ValueError(f"{count} cells are wanted, {self.free} are free")
        chain = self._chains.setdefault(sequence, [])
        if not chain or chain[-1].owners > 1:
            chain.append(_Segment(0))
            self._own(sequence, chain[-1])
        chain[-1].length += count
        self.used += count
        if sequence >= self._slots:
            self.idle += count

    def share(self, source: int, target: int) -> None:
        """`source` was copied to `target`, which must be empty. Raises ValueError when it is not."""
        if self._chains.get(target):
            raise ValueError(f"sequence {target} is not empty")
        chain = self._chains[target] = list(self._chains.get(source, ()))
        for segment in chain:
            self._own(target, segment)

    def truncate(self, sequence: int, length: int) -> None:
        """Take back what was appended beyond `length`. Raises ValueError when others share that."""
        chain = self._chains.get(sequence, [])
        surplus = self.length(sequence) - length
        while surplus > 0:
            segment = chain[-1]
            if segment.owners > 1:
                raise ValueError(f"cells beyond {length} of sequence {sequence} are shared")
            gone = min(surplus, segment.length)
            segment.length -= gone
            surplus -= gone
            self.used -= gone
            if not segment.running:
                self.idle -= gone
            if not segment.length:
                chain.pop()

    def drop(self, sequence: int) -> None:
        """A sequence was freed."""
        for segment in self._chains.pop(sequence, ()):
            segment.owners -= 1
            if sequence < self._slots:
                segment.running -= 1
                if not segment.running:
                    self.idle += segment.length
            if not segment.owners:
                self.idle -= segment.length
                self.used -= segment.length

    def exclusive(self, sequence: int) -> int:
        """Cells that would be free if this sequence went."""
        return sum(segment.length for segment in self._chains.get(sequence, ()) if segment.owners == 1)

    def idle_in(self, sequence: int) -> int:
        """Cells of this sequence that no running one shares."""
        return sum(segment.length for segment in self._chains.get(sequence, ()) if not segment.running)

    def run_by(self, sequence: int) -> int:
        """Cells of this running sequence that no other running one shares."""
        return sum(segment.length for segment in self._chains.get(sequence, ()) if segment.running == 1)

    def _own(self, sequence: int, segment: _Segment) -> None:
        segment.owners += 1
        if sequence < self._slots:
            if not segment.running and segment.owners > 1:
                self.idle -= segment.length
            segment.running += 1


class StreamCells(CellAllocator):
    """The same where every sequence id has cells of its own: who is copied shares nothing."""

    def share(self, source: int, target: int) -> None:
        """`source` was copied to `target`, which must be empty. Raises ValueError when it is not."""
        if self.length(target):
            raise ValueError(f"sequence {target} is not empty")
        self.append(target, self.length(source))
