"""The scheduler alone, against a pretend model: every policy it promises, for random mixes of requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.prefix_cache import PrefixCache, Saved, Spans
from server.engine.sampling import Sampler
from server.engine.scheduler import Chunk, Scheduler, Step
from server.engine.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

NO_SAMPLER = cast("Sampler", None)


def sequence(prompt: int, max_tokens: int = 10) -> Sequence:
    return Sequence(list(range(prompt)), max_tokens, NO_SAMPLER)


class NoMemory:
    """There is nothing to copy where nothing is computed."""

    def copy(self, source: int, target: int) -> None:
        pass

    def remove(self, sequence: int) -> None:
        pass

    def save(self, sequence: int) -> Saved:
        raise AssertionError

    def restore(self, sequence: int, saved: Saved) -> None:
        raise AssertionError


def scheduler(
    slots: int = 4,
    cells: int = 1000,
    batch: int = 64,
    budget: int = 16,
    release: Callable[[int], None] = lambda slot: None,
    **options: Any,
) -> Scheduler:
    """A scheduler without a prefix cache."""
    cache = PrefixCache(NoMemory(), Spans(slots, cells), ids=(), total_cells=cells, cells=0)
    return Scheduler(
        slots=slots, batch_size=batch, prefill_budget=budget, cache=cache, release=release, **options
    )


def slots_of(step: Step) -> npt.NDArray[np.int32]:
    """The slot of each token."""
    slots = [chunk.sequence.slot or 0 for chunk in step.chunks for _ in range(chunk.n_tokens)]
    return np.array(slots, np.int32)


def advance(s: Scheduler) -> Step:
    """One step of a model that answers every sampled row with token 7, up to the sequence's limit."""
    step = s.schedule()
    s.postprocess(step, slots_of(step))
    for chunk in step.chunks:
        if chunk.samples:
            chunk.sequence.tokens.append(7)
            if len(chunk.sequence.tokens) == chunk.sequence.limit:
                s.remove(chunk.sequence)
    return step


def counts(step: Step) -> list[int]:
    return [chunk.count for chunk in step.chunks]


def test_a_prompt_longer_than_a_batch_is_cut_into_chunks() -> None:
    s = scheduler(batch=64)
    s.add(one := sequence(150))
    assert [counts(advance(s)) for _ in range(4)] == [[64], [64], [22], [1]]
    assert one.generated == 2


def test_only_the_last_chunk_of_a_prompt_samples() -> None:
    s = scheduler(batch=64)
    s.add(sequence(100))
    assert [chunk.samples for _ in range(3) for chunk in advance(s).chunks] == [False, True, True]


def test_decodes_come_first_and_prompts_get_the_budget() -> None:
    s = scheduler(batch=64, budget=16)
    s.add(first := sequence(5))
    advance(s)
    s.add(second := sequence(40))
    step = advance(s)
    assert step.chunks == [Chunk(first, 1, True), Chunk(second, 16, False)]


def test_the_budget_is_a_whole_batch_when_nobody_decodes() -> None:
    s = scheduler(batch=64, budget=16)
    s.add(sequence(40))
    s.add(sequence(40))
    assert counts(advance(s)) == [40, 24]


def test_prompts_share_the_budget_in_order_of_arrival() -> None:
    s = scheduler(batch=64, budget=16)
    s.add(sequence(2))
    advance(s)
    for length in (10, 10, 10):
        s.add(sequence(length))
    assert counts(advance(s)) == [1, 10, 6]
    assert counts(advance(s)) == [1, 1, 4, 10]


def test_no_more_run_than_there_are_slots() -> None:
    s = scheduler(slots=2)
    for _ in range(3):
        s.add(sequence(4, max_tokens=3))
    advance(s)
    assert (len(s.running), len(s.waiting)) == (2, 1)
    advance(s)
    advance(s)
    advance(s)
    assert (len(s.running), len(s.waiting)) == (1, 0)


def test_nobody_overtakes_a_request_that_waits_for_cells() -> None:
    s = scheduler(cells=200)
    s.add(sequence(100, max_tokens=50))
    advance(s)
    s.add(large := sequence(150, max_tokens=20))
    s.add(small := sequence(2, max_tokens=2))
    advance(s)
    assert list(s.waiting) == [large, small]


def test_the_youngest_is_preempted_when_cells_run_out_and_reads_everything_again() -> None:
    released: list[int] = []
    s = scheduler(slots=2, cells=160, batch=64, budget=64, release=released.append)
    s.add(old := sequence(10, max_tokens=140))
    s.add(young := sequence(10, max_tokens=140))
    while not s.preemptions:
        advance(s)
    assert released == [1]
    assert list(s.waiting) == [young]
    assert (young.cached, young.slot) == (0, None)
    tokens_before = list(young.tokens)
    while old.slot is not None:
        advance(s)
    assert young.tokens[: len(tokens_before)] == tokens_before
    while s.running or s.waiting:
        advance(s)
    assert (old.generated, young.generated) == (140, 140)


def test_prompts_that_fill_the_cache_together_do_not_lock_up() -> None:
    s = scheduler(slots=2, cells=128, batch=32)
    s.add(a := sequence(60, max_tokens=68))
    advance(s)
    s.add(b := sequence(60, max_tokens=68))
    while s.running or s.waiting:
        advance(s)
    assert (a.generated, b.generated) == (68, 68)


@pytest.mark.parametrize("when", ["waiting", "prefilling", "decoding"])
def test_removing_frees_slot_and_cells(when: str) -> None:
    s = scheduler(slots=1, batch=16)
    s.add(one := sequence(30))
    steps = {"waiting": 0, "prefilling": 1, "decoding": 3}[when]
    for _ in range(steps):
        advance(s)
    s.remove(one)
    assert (s.running, list(s.waiting), s.cells_used) == ([], [], 0)
    s.add(two := sequence(5))
    advance(s)
    assert two.slot == 0


@dataclass
class Plan:
    prompt: int
    answer: int
    arrives: int
    cancelled: int | None


plans = st.builds(
    Plan,
    prompt=st.integers(1, 80),
    answer=st.integers(1, 40),
    arrives=st.integers(0, 60),
    cancelled=st.none() | st.integers(0, 100),
)


@dataclass
class Watched:
    """Runs a mix of requests to the end and checks every step against the policy."""

    s: Scheduler
    batch: int
    budget: int
    admitted: list[Sequence] = field(default_factory=list)

    def step(self) -> None:
        decoding = {x for x in self.s.running if x.ready}
        oldest = self.s.running[0] if self.s.running else None
        before = self.s.preemptions
        step = self.s.schedule()
        assert step.chunks, "there is work, but nothing was scheduled"
        assert step.n_tokens == sum(counts(step)) <= self.batch
        in_step = [chunk.sequence for chunk in step.chunks]
        assert len(set(in_step)) == len(in_step)
        assert all(chunk.samples == (chunk.count == chunk.sequence.pending) for chunk in step.chunks)
        if self.s.preemptions == before:
            assert decoding <= set(in_step), "a running stream was held up"
        if decoding & set(in_step):
            assert sum(c.count for c in step.chunks if not c.sequence.ready) <= self.budget
        assert oldest is None or oldest in self.s.running, "the oldest was preempted"
        slots = [x.slot for x in self.s.running]
        assert None not in slots
        assert len(set(slots)) == len(slots)
        self.s.postprocess(step, slots_of(step))
        assert self.s.cells_used == sum(x.cached for x in self.s.running) <= self.s.cells
        self.admitted += [x for x in self.s.running if x not in self.admitted]
        for chunk in step.chunks:
            if chunk.samples:
                chunk.sequence.tokens.append(7)
                if len(chunk.sequence.tokens) == chunk.sequence.limit:
                    self.s.remove(chunk.sequence)


@settings(max_examples=150, deadline=None)
@given(
    mix=st.lists(plans, min_size=1, max_size=12),
    slots=st.integers(1, 5),
    cells=st.integers(120, 300),
    batch=st.integers(5, 64),
    budget=st.integers(1, 64),
)
def test_every_mix_of_requests_is_served_in_order(
    mix: list[Plan], slots: int, cells: int, batch: int, budget: int
) -> None:
    s = scheduler(slots=slots, cells=cells, batch=batch, budget=budget)
    watched = Watched(s, batch, budget)
    sequences = [sequence(plan.prompt, plan.answer) for plan in mix]
    cancelled: set[Sequence] = set()
    arrived: list[Sequence] = []
    now = 0
    while len(arrived) < len(mix) or s.running or s.waiting:
        for plan, one in zip(mix, sequences, strict=True):
            if plan.arrives <= now and one not in arrived:
                arrived.append(one)
                s.add(one)
            if plan.cancelled == now and (one.slot is not None or one in s.waiting):
                s.remove(one)
                cancelled.add(one)
        if s.running or s.waiting:
            watched.step()
        now += 1
        assert now < 20_000
    assert s.cells_used == 0
    for plan, one in zip(mix, sequences, strict=True):
        assert one in cancelled or one.generated == plan.answer
    order = [one for one in arrived if one in watched.admitted]
    assert watched.admitted == order, "a later request was admitted before an earlier one"


def test_a_flood_of_long_prompts_neither_starves_a_stream_nor_is_starved_by_it() -> None:
    s = scheduler(slots=4, cells=4000, batch=64, budget=16)
    s.add(stream := sequence(4, max_tokens=400))
    advance(s)
    flood = [sequence(200, max_tokens=2) for _ in range(10)]
    for one in flood:
        s.add(one)
    for _ in range(200):
        generated = stream.generated
        advance(s)
        assert stream.generated == generated + 1
    assert all(one.generated == 2 for one in flood)


def test_half_of_the_budget_is_the_oldest_prompt_s_and_the_rest_the_shortest_one_s() -> None:
    s = scheduler(batch=64, budget=16)
    s.add(sequence(2, max_tokens=100))
    advance(s)
    s.add(sequence(200))
    s.add(sequence(100))
    s.add(sequence(12))
    assert counts(advance(s)) == [1, 8, 8]
    assert counts(advance(s)) == [1, 12, 4]
    assert counts(advance(s)) == [1, 1, 8, 8]


def test_no_pass_is_spent_on_a_few_tokens_of_a_prompt() -> None:
    s = scheduler(slots=4, batch=128)
    for _ in range(4):
        s.add(sequence(61))
    assert counts(advance(s)) == [61, 61]  # 6 of the third would be a pass of their own


def test_a_short_prompt_is_not_stuck_behind_a_flood_of_long_ones() -> None:
    s = scheduler(slots=6, cells=4000, batch=64, budget=16)
    s.add(sequence(4, max_tokens=400))
    advance(s)
    for _ in range(4):
        s.add(sequence(600))
    advance(s)
    s.add(short := sequence(24))
    for _ in range(4):
        advance(s)
    assert short.generated >= 1


def test_a_long_prompt_is_not_starved_by_a_flood_of_short_ones() -> None:
    s = scheduler(slots=4, cells=4000, batch=64, budget=16)
    s.add(sequence(4, max_tokens=400))
    advance(s)
    s.add(long := sequence(200))
    for step in range(1, 25):
        s.add(sequence(10, max_tokens=1))
        advance(s)
        assert long.cached >= 8 * step


def test_apart_decodes_and_prompts_take_turns() -> None:
    s = scheduler(slots=4, batch=64, budget=16, mixed_steps=False)
    s.add(stream := sequence(4, max_tokens=100))
    advance(s)
    for _ in range(3):
        s.add(sequence(60))
    kinds = []
    while s.waiting or any(x.pending > 1 for x in s.running):
        ready = [x for x in s.running if x.ready]
        in_step = [chunk.sequence for chunk in advance(s).chunks]
        assert in_step == ready or not set(in_step) & set(ready)
        kinds.append(stream in in_step)
    assert kinds[:6] in ([True, False] * 3, [False, True] * 3)


def test_without_prompts_nobody_waits_for_a_turn() -> None:
    s = scheduler(mixed_steps=False)
    s.add(stream := sequence(1, max_tokens=20))
    for n in range(20):
        assert stream.generated == n
        advance(s)


# --- drafts ------------------------------------------------------------------------------------------------


def test_drafts_are_verified_apart_from_prompts() -> None:
    s = scheduler(batch=64, budget=16, propose=lambda ready, rows: [[8, 9] for _ in ready])
    s.add(stream := sequence(4, max_tokens=100))
    advance(s)
    s.add(sequence(40))
    step = s.schedule()
    assert step.chunks == [Chunk(stream, 1, True, [8, 9])]
    s.postprocess(step, slots_of(step))
    s.settle(step.chunks[0], 0)
    step = s.schedule()
    assert counts(step) == [16]
    s.postprocess(step, slots_of(step))
    assert s.schedule().chunks[0].draft == [8, 9]


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_a_draft_is_kept_as_a_whole_or_not_at_all(accepted: int) -> None:
    s = scheduler(propose=lambda ready, rows: [[8, 9] for _ in ready])
    s.add(stream := sequence(4, max_tokens=100))
    step = s.schedule()
    s.postprocess(step, slots_of(step))
    stream.tokens.append(7)
    step = s.schedule()
    s.postprocess(step, slots_of(step))
    stream.tokens += [8, 9, 10][: accepted + 1]
    s.settle(step.chunks[0], accepted)
    if accepted == 2:
        assert (stream.cached, stream.pending, s.cells_used) == (7, 1, 7)
    else:
        assert (stream.cached, stream.pending, s.cells_used) == (4, 1 + accepted + 1, 4)
        assert stream.ready, "it catches up, which is no prefill"
        assert s.schedule().chunks[0].count == accepted + 2


def test_drafts_give_way_when_a_step_or_the_cells_are_full() -> None:
    asked: list[int] = []

    def propose(ready: list[Sequence], rows: int) -> list[list[int]]:
        asked.append(rows)
        return [[8] * 20 for _ in ready]

    s = scheduler(slots=3, batch=32, cells=64, propose=propose)
    for _ in range(3):
        s.add(sequence(1, max_tokens=20))
    step = s.schedule()
    assert asked == [32 - 3]
    assert [len(chunk.draft) for chunk in step.chunks] == [20, 0, 0]
    crowded = scheduler(slots=1, batch=32, cells=18, propose=propose)
    crowded.add(sequence(1, max_tokens=10))
    assert [chunk.draft for chunk in crowded.schedule().chunks] == [[]]
