"""The state store: its count of cells equals llama.cpp's, and drafters follow its operations or fail
alone."""

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from qwen_serve.llamacpp import Context, ContextOptions, Model
from qwen_serve.llamacpp.errors import LlamaError, NoMemorySlot
from qwen_serve.server.engine.batch import Batch
from qwen_serve.server.engine.request import Request
from qwen_serve.server.engine.speculation.hidden import HiddenDrafter
from qwen_serve.server.engine.states import StateStore
from tests.server.engine.fake_context import FakeContext
from tests.server.engine.scheduling import NO_SAMPLER, store

TOTAL, N_SEQ, SLOTS, N_UBATCH = 512, 8, 4, 64

REPORT = re.compile(r"find_slot: stream\[0\], n = +\d+, used = +(\d+)")
"""What llama.cpp logs before it places tokens, with LLAMA_KV_CACHE_DEBUG: its occupied cells."""


@pytest.fixture
def context(nano_f32: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    monkeypatch.setenv("LLAMA_KV_CACHE_DEBUG", "1")
    model = Model(nano_f32, n_gpu_layers=0)
    options = ContextOptions(
        n_ctx=TOTAL,
        n_seq=N_SEQ,
        n_batch=TOTAL + 1,
        n_ubatch=N_UBATCH,
        n_outputs=N_SEQ,
        threads=1,
        threads_batch=1,
        flash_attn="off",
        type_k="f16",
        type_v="f16",
    )
    context = Context(model, options)
    yield context
    context.close()
    model.close()


@pytest.mark.parametrize("seed", range(6))
def test_llama_cpp_has_as_many_cells_occupied(
    context: Context, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Random batches, copies, removals and restored states: its own log agrees each time.

    In the end so many more tokens fit as are free by our count, and not one more.
    """
    caplog.set_level(1, logger="llama.cpp")
    rng = random.Random(seed)
    states = StateStore(context, SLOTS, range(SLOTS, SLOTS))
    cells = states.cells

    def write(slots: list[int], count: int) -> Batch:
        """So many tokens of each, in the order in which they are computed: pass by pass."""
        most = N_UBATCH // len(slots)
        passes = [min(most, count - start) for start in range(0, count, most)]
        sequences = [slot for length in passes for slot in slots for _ in range(length)]
        seen = {slot: states.length(slot) for slot in slots}
        batch, n = Batch(), len(sequences)
        for slot in slots:
            one = Request([300] * (seen[slot] + count), 9, NO_SAMPLER)
            one.slot, one.computed = slot, seen[slot]
            batch.add(one, count)
        for i, slot in enumerate(sequences):
            context.positions[i] = seen[slot]
            seen[slot] += 1
        context.tokens[:n] = 300
        context.sequences[:n] = sequences
        context.outputs[:n] = 0
        context.outputs[n - 1] = 1
        return batch

    def decode(slots: list[int], count: int) -> None:
        batch = write(slots, count)
        caplog.clear()
        context.decode(batch.n_tokens)
        found = [match for record in caplog.records if (match := REPORT.search(record.getMessage()))]
        assert int(found[0][1]) == cells.used
        for slot in slots:
            cells.append(slot, count)

    for _ in range(80):
        sequence, other = rng.sample(range(N_SEQ), 2)
        match rng.randrange(6):
            case 0 | 1 | 2 if cells.free >= 8:
                chosen = rng.sample(range(SLOTS), rng.randint(1, SLOTS))
                decode(chosen, rng.randint(1, min(30, cells.free // len(chosen))))
            case 3 if not states.length(other) and states.length(sequence):
                states.copy(sequence, other)
            case 4:
                states.free(sequence)
            case 5 if states.length(sequence) and sequence >= SLOTS:
                saved = states.save(sequence)
                states.free(sequence)
                if saved.length <= cells.free:
                    states.restore(sequence, saved)
    if not cells.used:
        decode([0], 1)
    free = cells.free
    with pytest.raises(NoMemorySlot):
        context.decode(write([0], free + 1).n_tokens)
    if free:
        decode([0], free)
    assert (cells.used, cells.free) == (TOTAL, 0)


# --- drafters ----------------------------------------------------------------------------------------------


class FakeDrafter:
    """A drafter that keeps a word for each sequence id, and fails on demand."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.words: dict[int, str] = {}
        self.lost = 0

    def _perhaps_fail(self, what: str) -> None:
        if self.fails == what:
            raise LlamaError(f"no room to {what}")

    def copy(self, source: int, target: int) -> None:
        self.words[target] = self.words[source]
        self._perhaps_fail("copy")

    def free(self, sequence: int) -> None:
        self.words.pop(sequence, None)
        self._perhaps_fail("free")

    def save(self, sequence: int) -> Any:
        self._perhaps_fail("save")
        word = self.words.get(sequence)
        return None if word is None else np.array([ord(letter) for letter in word], np.int32)

    def restore(self, sequence: int, saved: Any) -> None:
        self.words[sequence] = "".join(map(chr, saved))
        self._perhaps_fail("restore")


def store_with_drafters(fails: str = "") -> tuple[StateStore, FakeContext, FakeDrafter, FakeDrafter]:
    """A store in which slot 0 holds three tokens and a word, and one of its two drafters fails."""
    context = FakeContext()
    states, broken, sound = store(context, 2), FakeDrafter(fails), FakeDrafter()
    states.hidden_drafters += cast("list[HiddenDrafter]", [broken, sound])
    context.held[0] = (5, 6, 7)
    states.cells.append(0, 3)
    broken.words[0], sound.words[0] = "left", "right"
    return states, context, broken, sound


def test_drafters_go_where_the_trunk_goes() -> None:
    states, context, _, sound = store_with_drafters()
    states.copy(0, 3)
    assert (context.held[3], states.length(3), sound.words[3]) == ((5, 6, 7), 3, "right")
    assert states.cells.used == 3, "cells are shared"
    saved = states.save(3)
    assert (saved.length, saved.nbytes) == (3, 3 + 4 * 4 + 4 * 5)
    states.free(3)
    states.free(0)
    assert (context.held, sound.words, states.cells.used) == ({}, {}, 0)
    states.restore(2, saved)
    assert (context.held, states.length(2), sound.words) == ({2: (5, 6, 7)}, 3, {2: "right"})


def test_a_drafter_that_fails_loses_its_own_state_alone(caplog: pytest.LogCaptureFixture) -> None:
    states, context, broken, sound = store_with_drafters("copy")
    states.copy(0, 3)
    assert (context.held[3], states.length(3)) == ((5, 6, 7), 3)
    assert (broken.words, sound.words) == ({0: "left"}, {0: "right", 3: "right"})
    assert "FakeDrafter of sequence 3 is lost: no room to copy" in caplog.text
    broken.words[3], broken.fails = "again", "restore"
    saved = states.save(3)
    states.free(3)
    states.restore(3, saved)
    assert (context.held[3], states.length(3)) == ((5, 6, 7), 3)
    assert (broken.words, sound.words) == ({0: "left"}, {0: "right", 3: "right"})
    assert (broken.lost, sound.lost) == (2, 0)


@pytest.mark.parametrize("fails", ["save", "free"])
def test_a_drafter_that_cannot_save_or_free_keeps_nobody_from_it(fails: str) -> None:
    states, context, broken, sound = store_with_drafters(fails)
    saved = states.save(0)
    assert (saved.length, saved.drafters[0] is None) == (3, fails == "save")
    states.free(0)
    assert (states.length(0), context.held.get(0, ()), sound.words) == (0, (), {})
    assert broken.lost == 1


def test_what_can_not_be_saved_is_still_there() -> None:
    states, context, _, _ = store_with_drafters()
    context.fails_to_save = True
    with pytest.raises(LlamaError, match="no host memory"):
        states.save(0)
    assert (context.held[0], states.length(0)) == ((5, 6, 7), 3)


def test_what_can_not_be_restored_leaves_nothing() -> None:
    states, context, _, sound = store_with_drafters()
    saved = states.save(0)
    context.fails_to_restore = True
    with pytest.raises(LlamaError, match="no cells"):
        states.restore(3, saved)
    assert 3 not in context.held
    assert 3 not in sound.words
    assert (states.length(3), states.cells.used) == (0, 3)
