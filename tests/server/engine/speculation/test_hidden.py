"""Rows that wait for a drafter: how many are kept, without being moved about, and what a failure costs.

What becomes of sequence ids is in test_mtp, which does it all with a head that checks what it is fed.
"""

from typing import Any, cast

import numpy as np
import pytest

from qwen_serve.llamacpp.errors import LlamaError
from qwen_serve.server.engine.speculation.dflash import DflashDrafter, host_bytes
from tests.server.engine.inside import draft_states

WINDOW, WIDTH, SLOTS = 32, 6, 2


class Cache:
    """A block drafter's cache that records injected rows."""

    n_batch, source = 16, None

    def __init__(self) -> None:
        self.injected = np.zeros((self.n_batch, WIDTH), np.float32)
        self.positions = np.zeros(self.n_batch, int)
        self.sequences = np.zeros(self.n_batch, int)
        self.entries: dict[int, dict[int, float]] = {}
        self.error: Exception | None = None

    def inject(self, n: int) -> None:
        if self.error is not None:
            raise self.error
        for i in range(n):
            self.entries.setdefault(int(self.sequences[i]), {})[int(self.positions[i])] = float(
                self.injected[i, 0]
            )

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        self.entries[target] = {p: row for p, row in self.entries[source].items() if start <= p < end}

    def remove(self, sequence_id: int, start: int = 0, end: int = 2**31) -> None:
        mine = self.entries.get(sequence_id, {})
        self.entries[sequence_id] = {p: row for p, row in mine.items() if not start <= p < end}


@pytest.fixture
def cache() -> Cache:
    return Cache()


@pytest.fixture
def drafter(cache: Cache) -> DflashDrafter:
    class Spec:
        layers, block, mask = (1, 2), 8, 0

    return DflashDrafter(cast("Any", cache), cast("Any", Spec), WINDOW, slots=SLOTS, most=SLOTS)


def rows(start: int, n: int) -> np.ndarray:
    return np.repeat(np.arange(start, start + n, dtype=np.float32)[:, None], WIDTH, axis=1)


def test_while_it_rests_rows_are_neither_moved_nor_piled_up(drafter: DflashDrafter) -> None:
    prompt = rows(0, WINDOW)
    drafter.collect(0, 0, prompt)
    for position in range(WINDOW, 5 * WINDOW):
        drafter.collect(0, position, rows(position, 1))
        state = draft_states(drafter)[0]
        assert state.end - state.start == WINDOW == sum(map(len, state.rows))
        if position < 2 * WINDOW - 1:
            assert state.rows[0].base is prompt, "the prompt's rows are where they were"
        held = {id(owner): owner.nbytes for piece in state.rows for owner in [_owner(piece)]}
        assert sum(held.values()) <= host_bytes(1, WINDOW, WIDTH)


def _owner(piece: np.ndarray) -> np.ndarray:
    base = piece.base
    return piece if base is None else _owner(base)


def test_what_was_missed_is_forgotten(drafter: DflashDrafter, cache: Cache) -> None:
    drafter.collect(0, 0, rows(0, 20))
    drafter.copy(0, SLOTS)
    assert cache.entries[0] == cache.entries[SLOTS] == {p: float(p) for p in range(20)}
    for start in range(20, 20 + 2 * WINDOW, 5):
        drafter.collect(0, start, rows(start, 5))
    assert not cache.entries[0]
    drafter.copy(0, SLOTS + 1)
    end = draft_states(drafter)[0].end
    assert cache.entries[SLOTS + 1] == {p: float(p) for p in range(end - WINDOW, end)}


def test_a_copy_that_fails_leaves_no_reading_that_the_cache_has_not(
    drafter: DflashDrafter, cache: Cache
) -> None:
    drafter.collect(0, 0, rows(0, 20))
    cache.error = LlamaError("no")
    with pytest.raises(LlamaError):
        drafter.copy(0, SLOTS)
    assert not draft_states(drafter), "neither of the source nor of the copy"
    cache.error = None
    drafter.collect(0, 20, rows(20, 5))
    drafter.copy(0, SLOTS)
    assert cache.entries[SLOTS] == {p: float(p) for p in range(20, 25)}
