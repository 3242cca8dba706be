"""Counts the KV cells in use, which sequences may share."""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Segment:
    """Adjacent cells of a sequence that have the same owners."""

    length: int
    owners: int = 0
    running: int = 0
    """Owners that are slots."""


class CellAllocator:
    """Counts the cells of a unified KV cache (llama-kv-cells.h) as llama.cpp shares them; a token takes one.

    A sequence is a chain of segments. A copy shares the chain, and tokens appended afterwards get segments of
    their own. So a segment is shared as a whole or not at all, and counting its owners is exact. Ids below
    `slots` run requests, the others hold checkpoints.
    """

    def __init__(self, slots: int, total: int) -> None:
        self.total = total
        self.used = 0
        """Distinct cells, all sequences together."""
        self.idle = 0
        """Used cells that no running sequence owns, so evicting checkpoints can free them."""
        self._slots = slots
        self._chains: dict[int, list[_Segment]] = {}

    @property
    def free(self) -> int:
        return self.total - self.used

    @property
    def available(self) -> int:
        """Cells that running sequences do not use: the free cells and the idle ones."""
        return self.free + self.idle

    def length(self, sequence: int) -> int:
        """Cells of one sequence, shared or not."""
        return sum(segment.length for segment in self._chains.get(sequence, ()))

    def append(self, sequence: int, count: int) -> None:
        """Append `count` tokens to a sequence. Raises ValueError if there are fewer free cells."""
        if self.used + count > self.total:
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
        """`source` was copied to `target`. Raises ValueError if `target` was not empty."""
        if self._chains.get(target):
            raise ValueError(f"sequence {target} is not empty")
        chain = self._chains[target] = list(self._chains.get(source, ()))
        for segment in chain:
            self._own(target, segment)

    def truncate(self, sequence: int, length: int) -> None:
        """Remove the cells beyond `length`. Raises ValueError if another sequence shares them."""
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
        """Free a sequence's cells."""
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
        """Cells that dropping this sequence would free."""
        return sum(segment.length for segment in self._chains.get(sequence, ()) if segment.owners == 1)

    def idle_in(self, sequence: int) -> int:
        """Cells of this sequence that no running sequence shares."""
        return sum(segment.length for segment in self._chains.get(sequence, ()) if not segment.running)

    def run_by(self, sequence: int) -> int:
        """Cells of this running sequence that no other running sequence shares."""
        return sum(segment.length for segment in self._chains.get(sequence, ()) if segment.running == 1)

    def _own(self, sequence: int, segment: _Segment) -> None:
        segment.owners += 1
        if sequence < self._slots:
            if not segment.running and segment.owners > 1:
                self.idle -= segment.length
            segment.running += 1


class StreamCells(CellAllocator):
    """Counts cells where every sequence id has cells of its own: a copy shares nothing."""

    def share(self, source: int, target: int) -> None:
        """`source` was copied to `target`. Raises ValueError if `target` was not empty."""
        if self.length(target):
            raise ValueError(f"sequence {target} is not empty")
        self.append(target, self.length(source))
