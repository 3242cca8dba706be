"""The count of distinct cells, against plain sets of cells and against llama.cpp itself."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from server.engine.errors import NoMemorySlot
from server.engine.llama import Context, ContextOptions, Model
from server.engine.prefix_cache import Spans

if TYPE_CHECKING:
    from pathlib import Path

SLOTS, IDS = 3, 7


class AgainstSets(RuleBasedStateMachine):
    """Every cell has a number; sequences are lists of them."""

    def __init__(self) -> None:
        super().__init__()
        self.spans = Spans(SLOTS)
        self.cells: dict[int, list[int]] = {sequence: [] for sequence in range(IDS)}
        self.committed = dict.fromkeys(range(SLOTS), 0)
        self.next_cell = 0

    @rule(slot=st.integers(0, SLOTS - 1), count=st.integers(1, 9))
    def append(self, slot: int, count: int) -> None:
        self.spans.append(slot, count)
        self.cells[slot] += range(self.next_cell, self.next_cell + count)
        self.next_cell += count

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
                self.spans.share(old, new)
            return
        self.spans.share(old, new)
        self.cells[new] = list(self.cells[old])

    @rule(sequence=st.integers(0, IDS - 1))
    def drop(self, sequence: int) -> None:
        self.spans.drop(sequence)
        self.cells[sequence] = []

    @rule(slot=st.integers(0, SLOTS - 1), cut=st.integers(1, 12))
    def truncate(self, slot: int, cut: int) -> None:
        length = len(self.cells[slot]) - cut
        if length < 0:
            return
        others = {cell for sequence, cells in self.cells.items() if sequence != slot for cell in cells}
        if others & set(self.cells[slot][length:]):
            with pytest.raises(ValueError, match="shared"):
                self.spans.truncate(slot, length)
            self.drop(slot)  # a part may have gone before the shared one was met
        else:
            self.spans.truncate(slot, length)
            del self.cells[slot][length:]

    @invariant()
    def used(self) -> None:
        assert self.spans.used == len(self.all_cells())

    @invariant()
    def idle(self) -> None:
        running = {cell for slot in range(SLOTS) for cell in self.cells[slot]}
        assert self.spans.idle == len(self.all_cells() - running)
        for sequence, cells in self.cells.items():
            assert self.spans.idle_in(sequence) == len(set(cells) - running)

    @invariant()
    def by_sequence(self) -> None:
        for sequence, cells in self.cells.items():
            assert self.spans.length(sequence) == len(cells)
            others = {cell for other, held in self.cells.items() if other != sequence for cell in held}
            assert self.spans.exclusive(sequence) == len(set(cells) - others)

    def all_cells(self) -> set[int]:
        return {cell for cells in self.cells.values() for cell in cells}


TestAgainstSets = AgainstSets.TestCase
TestAgainstSets.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("seed", range(6))
def test_llama_cpp_has_as_many_free_cells_as_are_counted(nano_f32: Path, seed: int) -> None:
    """After random appends, copies and removals: so many more tokens fit, and not one more."""
    rng = random.Random(seed)
    total, n_seq, slots = 256, 8, 4
    model = Model(nano_f32, n_gpu_layers=0)
    options = ContextOptions(
        n_ctx=total,
        n_seq=n_seq,
        n_batch=total + 1,
        n_ubatch=64,
        n_outputs=n_seq,
        threads=1,
        threads_batch=1,
        flash_attn="off",
        type_k="f16",
        type_v="f16",
    )
    context = Context(model, options)
    spans = Spans(slots)

    def append(slot: int, count: int) -> None:
        start = spans.length(slot)
        context.tokens[:count] = 300
        context.positions[:count] = range(start, start + count)
        context.sequences[:count] = slot
        context.outputs[:count] = 0
        context.outputs[count - 1] = 1
        context.decode(count)
        spans.append(slot, count)

    try:
        for _ in range(60):
            sequence, other = rng.sample(range(n_seq), 2)
            free = total - spans.used
            match rng.randrange(4):
                case 0 | 1 if sequence < slots and free:
                    append(sequence, rng.randint(1, min(free, 40)))
                case 2 if not spans.length(other) and spans.length(sequence):
                    context.copy(sequence, other)
                    spans.share(sequence, other)
                case 3:
                    context.remove(sequence)
                    spans.drop(sequence)
        for slot in range(slots):
            if spans.length(slot):
                break
        else:
            slot = 0
        free = total - spans.used
        with pytest.raises(NoMemorySlot):
            append(slot, free + 1)
        if free:
            append(slot, free)
        assert spans.used == total
    finally:
        context.close()
        model.close()
