"""The count of distinct cells against sets of cells. test_store.py compares it with llama.cpp."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from qwen_serve.server.engine.states import CellAllocator, StreamCells

SLOTS, IDS, CELLS = 3, 7, 90


class AgainstSets(RuleBasedStateMachine):
    """A model in which cells have numbers and sequences are lists of cells."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = CellAllocator(SLOTS, CELLS)
        self.cells: dict[int, list[int]] = {sequence: [] for sequence in range(IDS)}

    def take(self, count: int) -> list[int]:
        """Take the lowest free cells."""
        return sorted(set(range(CELLS)) - self.all_cells())[:count]

    @rule(slot=st.integers(0, SLOTS - 1), count=st.integers(1, 9))
    def append(self, slot: int, count: int) -> None:
        cells = self.take(count)
        if len(cells) < count:
            with pytest.raises(ValueError, match=f"{count} cells are wanted, {len(cells)} are free"):
                self.allocator.append(slot, count)
            return
        self.allocator.append(slot, count)
        self.cells[slot] += cells

    @rule(holder=st.integers(SLOTS, IDS - 1), count=st.integers(1, 9))
    def restore(self, holder: int, count: int) -> None:
        if not self.cells[holder]:
            self.append(holder, count)

    @rule(old=st.integers(0, IDS - 1), new=st.integers(0, IDS - 1))
    def share(self, old: int, new: int) -> None:
        if old == new:
            return
        if self.cells[new]:
            with pytest.raises(ValueError, match="not empty"):
                self.allocator.share(old, new)
            return
        self.allocator.share(old, new)
        self.cells[new] = list(self.cells[old])

    @rule(sequence=st.integers(0, IDS - 1))
    def drop(self, sequence: int) -> None:
        self.allocator.drop(sequence)
        self.cells[sequence] = []

    @rule(slot=st.integers(0, SLOTS - 1), cut=st.integers(1, 12))
    def truncate(self, slot: int, cut: int) -> None:
        length = len(self.cells[slot]) - cut
        if length < 0:
            return
        others = {cell for sequence, cells in self.cells.items() if sequence != slot for cell in cells}
        if others & set(self.cells[slot][length:]):
            with pytest.raises(ValueError, match="shared"):
                self.allocator.truncate(slot, length)
            self.drop(slot)  # a part may have gone before the shared one was met
        else:
            self.allocator.truncate(slot, length)
            del self.cells[slot][length:]

    @invariant()
    def used(self) -> None:
        assert self.allocator.used == len(self.all_cells())
        assert self.allocator.free == CELLS - len(self.all_cells())

    @invariant()
    def idle(self) -> None:
        running = {cell for slot in range(SLOTS) for cell in self.cells[slot]}
        assert self.allocator.idle == len(self.all_cells() - running)
        assert self.allocator.available == CELLS - len(running)
        for sequence, cells in self.cells.items():
            assert self.allocator.idle_in(sequence) == len(set(cells) - running)

    @invariant()
    def by_sequence(self) -> None:
        for sequence, cells in self.cells.items():
            assert self.allocator.length(sequence) == len(cells)
            others = {cell for other, held in self.cells.items() if other != sequence for cell in held}
            assert self.allocator.exclusive(sequence) == len(set(cells) - others)

    def all_cells(self) -> set[int]:
        return {cell for cells in self.cells.values() for cell in cells}


TestAgainstSets = AgainstSets.TestCase
TestAgainstSets.settings = settings(max_examples=60, stateful_step_count=40)


def test_in_streams_nothing_is_shared() -> None:
    cells = StreamCells(slots=2, total=40)
    cells.append(0, 10)
    cells.share(0, 3)
    assert (cells.used, cells.idle, cells.exclusive(3), cells.idle_in(3)) == (20, 10, 10, 10)
    cells.drop(0)
    cells.share(3, 1)
    cells.append(1, 5)
    assert (cells.used, cells.idle, cells.length(1), cells.length(3)) == (25, 10, 15, 10)
    with pytest.raises(ValueError, match="not empty"):
        cells.share(3, 1)
    cells.drop(3)
    cells.drop(1)
    assert (cells.used, cells.idle) == (0, 0)
