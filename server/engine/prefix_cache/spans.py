"""How many KV cells are occupied, when sequences share them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Span:
    """Neighbouring cells with the same owners."""

    length: int
    owners: int = 0
    running: int = 0
    """Owners that are slots."""


class Spans:
    """Counts the distinct cells of a unified KV cache, as llama.cpp itself keeps them (llama-kv-cells.h).

    A sequence is a chain of spans. Copying one shares its chain; what is appended afterwards is its own. So
    a span is never shared in part, and counting owners is exact. Ids below `slots` run requests, those above
    hold checkpoints.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._chains: dict[int, list[_Span]] = {}
        self.used = 0
        """Distinct cells, all sequences together."""
        self.idle = 0
        """Those among them that no running sequence shares: what giving up checkpoints can free."""

    def length(self, sequence: int) -> int:
        """Cells of one sequence, shared or not."""
        return sum(span.length for span in self._chains.get(sequence, ()))

    def append(self, sequence: int, cells: int) -> None:
        """A slot has decoded so many tokens."""
        chain = self._chains.setdefault(sequence, [])
        if not chain or chain[-1].owners > 1:
            chain.append(_Span(0))
            self._own(sequence, chain[-1])
        chain[-1].length += cells
        self.used += cells
        if sequence >= self._slots:
            self.idle += cells

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
            cut = min(surplus, span.length)
            span.length -= cut
            self.used -= cut
            if not span.running:
                self.idle -= cut
            surplus -= cut
            if not span.length:
                chain.pop()

    def drop(self, sequence: int) -> None:
        """A sequence was removed."""
        for span in self._chains.pop(sequence, ()):
            span.owners -= 1
            if sequence < self._slots:
                span.running -= 1
                if not span.running:
                    self.idle += span.length
            if not span.owners:
                self.used -= span.length
                self.idle -= span.length

    def exclusive(self, sequence: int) -> int:
        """Cells that would be free if this sequence went."""
        return sum(span.length for span in self._chains.get(sequence, ()) if span.owners == 1)

    def idle_in(self, sequence: int) -> int:
        """Cells of this sequence that no running one shares."""
        return sum(span.length for span in self._chains.get(sequence, ()) if not span.running)

    def _own(self, sequence: int, span: _Span) -> None:
        span.owners += 1
        if sequence < self._slots:
            if not span.running and span.owners > 1:
                self.idle -= span.length
            span.running += 1
