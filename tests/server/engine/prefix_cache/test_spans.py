"""The count of distinct cells, against plain sets of cells and against llama.cpp itself."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from server.engine.errors import NoMemorySlot
from server.engine.llama import Context, ContextOptions, Model
from server.engine.prefix_cache import Spans

if TYPE_CHECKING:
    from pathlib import Path

SLOTS, IDS, CELLS = 3, 7, 90


class AgainstSets(RuleBasedStateMachine):
    """Every cell has a number; sequences are lists of them."""

    def __init__(self) -> None:
        super().__init__()
        self.spans = Spans(SLOTS, CELLS)
        self.cells: dict[int, list[int]] = {sequence: [] for sequence in range(IDS)}

    def take(self, count: int) -> list[int]:
        """The lowest free cells."""
        return sorted(set(range(CELLS)) - self.all_cells())[:count]

    @rule(slot=st.integers(0, SLOTS - 1), count=st.integers(1, 9))
    def append(self, slot: int, count: int) -> None:
        cells = self.take(count)
        if len(cells) < count:
            with pytest.raises(ValueError, match=f"{count} cells are wanted, {len(cells)} are free"):
                self.spans.append(slot, count)
            return
        self.spans.append(slot, count)
        self.cells[slot] += cells

    @rule(batch=st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=9))
    def append_batch(self, batch: list[int]) -> None:
        cells = self.take(len(batch))
        if len(cells) == len(batch):
            self.spans.append_batch(np.array(batch, np.int32))
            for slot, cell in zip(batch, cells, strict=True):
                self.cells[slot].append(cell)

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
    def extents(self) -> None:
        running = {cell for slot in range(SLOTS) for cell in self.cells[slot]}
        assert self.spans.extent == max(self.all_cells(), default=-1) + 1
        for sequence, cells in self.cells.items():
            assert self.spans.idle_extent(sequence) == max(set(cells) - running, default=-1) + 1

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


REPORT = re.compile(r"find_slot: stream\[0\], n = +(\d+), used = +(\d+)")
"""What llama.cpp logs before it places tokens, with LLAMA_KV_CACHE_DEBUG: its extent, its occupied cells."""


@pytest.mark.parametrize("seed", range(6))
def test_llama_cpp_has_the_same_cells_occupied(
    nano_f32: Path, seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Random batches, copies, removals, taken back drafts and restored states: its own log agrees each time.

    In the end so many more tokens fit as are free by our count, and not one more.
    """
    monkeypatch.setenv("LLAMA_KV_CACHE_DEBUG", "1")
    caplog.set_level(1, logger="llama.cpp")
    rng = random.Random(seed)
    total, n_seq, slots = 512, 8, 4
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
    spans = Spans(slots, total)

    def decode(chosen: list[int], count: int) -> None:
        """So many tokens of each, in the order in which they are computed: pass by pass."""
        most = options.n_ubatch // len(chosen)
        passes = [min(most, count - start) for start in range(0, count, most)]
        batch = [slot for length in passes for slot in chosen for _ in range(length)]
        seen = {slot: spans.length(slot) for slot in chosen}
        n = len(batch)
        for i, slot in enumerate(batch):
            context.positions[i] = seen[slot]
            seen[slot] += 1
        context.tokens[:n] = 300
        context.sequences[:n] = batch
        context.outputs[:n] = 0
        context.outputs[n - 1] = 1
        caplog.clear()
        used, extent = spans.used, spans.extent
        context.decode(n)
        found = [match for record in caplog.records if (match := REPORT.search(record.getMessage()))]
        assert (int(found[0][1]), int(found[0][2])) == (extent, used)
        spans.append_batch(context.sequences[:n])

    try:
        for _ in range(80):
            sequence, other = rng.sample(range(n_seq), 2)
            free = total - spans.used
            match rng.randrange(6):
                case 0 | 1 | 2 if free >= 8:
                    chosen = rng.sample(range(slots), rng.randint(1, slots))
                    equal = rng.randint(1, min(30, free // len(chosen)))
                    decode(chosen, equal)
                case 3 if not spans.length(other) and spans.length(sequence):
                    context.copy(sequence, other)
                    spans.share(sequence, other)
                case 4:
                    context.remove(sequence)
                    spans.drop(sequence)
                case 5 if spans.length(sequence) and sequence >= slots:
                    saved, length = context.save(sequence), spans.length(sequence)
                    context.remove(sequence)
                    spans.drop(sequence)
                    if length <= total - spans.used:
                        context.restore(sequence, saved)
                        spans.append(sequence, length)
        if not spans.used:
            decode([0], 1)
        free = total - spans.used
        with pytest.raises(NoMemorySlot):
            context.sequences[: free + 1] = 0
            context.positions[: free + 1] = range(spans.length(0), spans.length(0) + free + 1)
            context.decode(free + 1)
        if free:
            decode([0], free)
        assert (spans.used, spans.extent) == (total, total)
    finally:
        context.close()
        model.close()
