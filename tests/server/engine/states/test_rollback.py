"""The state store on a bare context, fuzzed: append, verify, roll back, copy, save, and batch mates.

What each sequence id holds is compared with fresh prefills, and the cells counted with those that llama.cpp
says it has occupied.
"""

import random
import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from qwen_serve.llamacpp import HAS_OPERANDS, Context, ContextOptions, Model
from qwen_serve.llamacpp.errors import LlamaError
from qwen_serve.server.engine.batch import Batch
from qwen_serve.server.engine.request import Request
from qwen_serve.server.engine.states import StateStore
from tests.marks import slow_but
from tests.server.engine.helpers import EXACT
from tests.server.engine.scheduling import NO_SAMPLER

SLOTS, SPARE = 3, 2
FIRST_SPARE, LAST = 2 * SLOTS, 2 * SLOTS + SPARE
"""The rollback copies are in between; the last id is for fresh prefills."""
PROGRAMS, STEPS = 10, 12

REPORT = re.compile(r"find_slot: stream\[0\], n = +\d+, used = +(\d+)")
"""What llama.cpp logs before it places tokens, with LLAMA_KV_CACHE_DEBUG: its occupied cells."""


# parameter: snapshots, or below 0 operands
@pytest.fixture(scope="module", params=slow_but([0, 4, -5], [0, 1, 4, 8, -2, -5, -9]))
def context(model: Model, request: pytest.FixtureRequest) -> Iterator[Context]:
    options = ContextOptions(
        n_ctx=4096,
        n_seq=LAST + 1,
        n_batch=256,
        n_ubatch=32,
        n_outputs=256,
        threads=1,
        threads_batch=1,
        flash_attn=EXACT["flash_attn"],
        type_k=EXACT["cache_type_k"],
        type_v=EXACT["cache_type_v"],
        n_snapshots=max(0, request.param),
        n_operands=max(0, -request.param),
        operand_sequences=SLOTS,
    )
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("LLAMA_KV_CACHE_DEBUG", "1")
        context = Context(model, options)
    if request.param < 0 and not HAS_OPERANDS:
        context.close()
        pytest.skip("llama.cpp has no patch operand-verification")
    assert context.n_snapshots - context.n_operands == request.param
    yield context
    context.close()


def decode(
    context: Context, parts: dict[int, tuple[int, list[int]]], drafted: dict[int, int] | None = None
) -> dict[int, npt.NDArray[np.float32]]:
    """Decode tokens of several sequence ids, each from a position on, in one call. Returns the last logits of
    each. `drafted`: how many of their last tokens are drafts."""
    n, n_rows, last = 0, 0, dict[int, int]()
    for slot, (start, tokens) in parts.items():
        end = n + len(tokens)
        context.tokens[n:end] = tokens
        context.positions[n:end] = range(start, start + len(tokens))
        context.sequences[n:end] = slot
        context.outputs[n:end] = 0
        n_verified = (drafted or {}).get(slot, 0) + 1
        context.outputs[end - n_verified : end] = 1
        n_rows += n_verified
        last[slot] = n_rows - 1
        n = end
    context.decode(n)
    rows = context.logits(n_rows).copy()
    return {slot: rows[row] for slot, row in last.items()}


def fresh(context: Context, text: list[int]) -> npt.NDArray[np.float32]:
    """Logits after a text that is read alone."""
    for start in range(0, len(text), 32):
        rows = decode(context, {LAST: (start, text[start : start + 32])})
    context.remove(LAST)
    return rows[LAST]


def chunk_of(batch: Batch, slot: int, text: list[int], new: list[int], draft: list[int]) -> None:
    """Put into the batch what follows the `text` in a slot: `new` tokens, and a draft of more."""
    one = Request([*text, *new], 1000, NO_SAMPLER)
    one.slot, one.computed = slot, len(text)
    batch.add(one, len(new))
    if draft:
        batch.add_draft(batch.chunks[-1], draft)


class Program:
    """Random steps of three slots, alone or together, with spare ids that hold copies of them."""

    def __init__(self, context: Context, seed: int, log: pytest.LogCaptureFixture) -> None:
        self.context, self.rng, self.log = context, random.Random(seed), log
        copies = self.rng.choice([0, 1, SLOTS]) if context.n_operands else SLOTS
        rollback = range(SLOTS, SLOTS + copies)
        self.store = StateStore(context, SLOTS, rollback, device_copies=self.rng.choice([0, 3, 20]))
        self.texts: dict[int, list[int]] = {}
        self.spares: dict[int, list[int]] = {}
        self.compared = self.taken_back = 0
        context.clear()

    def some(self, n: int) -> list[int]:
        return [self.rng.randrange(300, 2000) for _ in range(n)]

    def step(self) -> None:
        rng = self.rng
        for slot in range(SLOTS):
            if slot in self.texts and rng.random() < 0.08:
                self.store.free(slot)
                del self.texts[slot]
            if slot not in self.texts and self.spares and rng.random() < 0.5:
                spare = rng.choice(list(self.spares))
                self.store.copy(spare, slot)
                self.texts[slot] = list(self.spares[spare])
        alone = rng.random() < 0.6
        slots = [rng.randrange(SLOTS)] if alone else [slot for slot in range(SLOTS) if rng.random() < 0.8]
        if slots:
            self.decode(slots)
        if self.texts and rng.random() < 0.3:
            self.copy(rng.choice(list(self.texts)))
        if self.spares and rng.random() < 0.2:
            self.move(rng.choice(list(self.spares)))
        for sequence, text in {**self.texts, **self.spares}.items():
            assert self.store.length(sequence) == len(text)

    def decode(self, slots: list[int]) -> None:
        """Run a step in which some slots verify drafts and others read prompts."""
        rng, batch, parts = self.rng, Batch(), {}
        for slot in slots:
            text = self.texts.setdefault(slot, [])
            new = self.some(rng.choice([1, 2, 2, 3, 5, 9, 9, 40]))
            drafted = rng.randrange(len(new)) if rng.random() < 0.7 else 0
            chunk_of(probe := Batch(), slot, text, new[: len(new) - drafted], [])
            if drafted > self.store.longest_draft(probe.chunks[0]):
                drafted = 0
            chunk_of(batch, slot, text, new[: len(new) - drafted], new[len(new) - drafted :])
            parts[slot] = len(text), new
        self.store.checkpoint(batch)
        self.log.clear()
        drafts = {chunk.slot: len(chunk.draft) for chunk in batch.chunks}
        rows, cells = decode(self.context, parts, drafts), self.store.cells
        reports = [found for record in self.log.records if (found := REPORT.search(record.getMessage()))]
        assert int(reports[0][1]) == cells.used
        for chunk in batch.chunks:
            cells.append(chunk.slot, chunk.n_tokens)
            slot, (start, new) = chunk.slot, parts[chunk.slot]
            accepted = rng.randint(0, len(chunk.draft))
            text = self.texts[slot]
            if accepted < len(chunk.draft):
                kept = self.store.rollback(chunk, accepted)
                assert kept in (start, start + chunk.count + accepted)
                self.taken_back += kept > start and len(batch.chunks) > 1
                self.texts[slot] = [*text, *new][:kept]
            else:
                text += new
                self.compare(slot, rows[slot])

    def compare(self, slot: int, row: npt.NDArray[np.float32]) -> None:
        if self.rng.random() < 0.4:  # else nothing comes between this step and the next
            assert np.abs(row - fresh(self.context, self.texts[slot])).max() < 2e-4
            self.compared += 1

    def copy(self, slot: int) -> None:
        if self.texts[slot]:
            spare = self.rng.randrange(FIRST_SPARE, LAST)
            self.store.free(spare)
            self.store.copy(slot, spare)
            self.spares[spare] = list(self.texts[slot])

    def move(self, spare: int) -> None:
        """Move a sequence to host memory and back, perhaps to another id."""
        saved, text = self.store.save(spare), self.spares.pop(spare)
        assert saved.length == len(text)
        self.store.free(spare)
        other = self.rng.randrange(FIRST_SPARE, LAST)
        self.store.free(other)
        self.store.restore(other, saved)
        self.spares[other] = text

    def finish(self) -> None:
        """Check that each sequence continues as its text would."""
        for sequence, text in {**self.texts, **self.spares}.items():
            new = self.some(2)
            row = decode(self.context, {sequence: (len(text), new)})[sequence]
            assert np.abs(row - fresh(self.context, text + new)).max() < 2e-4
            self.compared += 1


def test_every_state_is_that_of_its_text(context: Context, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(1, logger="llama.cpp")
    compared = went_back = taken_back = 0
    for seed in range(PROGRAMS):
        program = Program(context, seed, caplog)
        for _ in range(STEPS):
            program.step()
            went_back += bool(context._snapshots.pending)  # noqa: SLF001 - whether it comes to that
        program.finish()
        compared += program.compared
        taken_back += program.taken_back
    assert compared > 5 * PROGRAMS
    assert went_back > PROGRAMS // 4 or not context.n_snapshots
    assert taken_back > PROGRAMS // 4 or not context.n_operands


def test_a_lone_sequence_keeps_its_graph(model: Model) -> None:
    """With drafts of one length that are partly wrong, the first call builds a graph and later ones reuse
    it."""
    built = {}
    for n_snapshots, copied in ((0, 0), (4, 0), (0, 8), (2, 8)):
        options = ContextOptions(256, 4, 64, 64, 64, 1, 1, "off", "f32", "f32", n_snapshots=n_snapshots)
        context = Context(model, options)
        states = StateStore(context, 2, range(2, 3), device_copies=copied)
        rng, text = random.Random(0), [300]
        decode(context, {0: (0, text)})
        states.cells.append(0, 1)
        reused, n, waiting = context.graphs_reused, 20, [301]
        for _ in range(n):
            draft = [rng.randrange(300, 2000) for _ in range(5 - len(waiting))]
            batch = Batch()
            chunk_of(batch, 0, text, waiting, draft)
            states.checkpoint(batch)
            decode(context, {0: (len(text), [*waiting, *draft])})
            states.cells.append(0, batch.n_tokens)
            accepted = rng.randrange(len(draft) + 1)
            right = [*waiting, *draft[:accepted]]
            kept = len(text) + len(right)
            if accepted < len(draft):
                kept = states.rollback(batch.chunks[0], accepted)
            text, waiting = [*text, *right][:kept], [*[*text, *right][kept:], 302]
        built[n_snapshots, copied] = n - (context.graphs_reused - reused)
        context.close()
    assert built[4, 0] == built[0, 8] == built[2, 8] == 1
    if context.ragged_passes:  # a state is read by its id, wherever it lies
        assert built[0, 0] == 1
    else:
        assert built[0, 0] > 0.4 * n, "all but those after a draft that was wrong"


def test_what_would_go_wrong_is_refused(model: Model) -> None:
    options = ContextOptions(256, 4, 64, 64, 64, 1, 1, "off", "f32", "f32", n_snapshots=4)
    context = Context(model, options)
    decode(context, {0: (0, [300, 301, 302]), 1: (0, [300, 301, 302])})
    with pytest.raises(LlamaError, match="by 0 tokens, not by 1"):
        context.remove(0, 2)
    decode(context, {0: (3, [303, 304, 305])})
    with pytest.raises(LlamaError, match="by 2 tokens, not by 3"):
        context.remove(0, 3)
    context.copy(0, 2)
    with pytest.raises(LlamaError, match="by 0 tokens, not by 1"):
        context.remove(0, 5)
    decode(context, {0: (6, [306, 307])})
    assert context.remove(0, 7)
    with pytest.raises(LlamaError, match="by 0 tokens, not by 1"):
        context.remove(0, 6)
    context.close()
