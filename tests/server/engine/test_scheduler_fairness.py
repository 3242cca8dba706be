"""Any mix of requests is served in order, and nobody is starved or held up by a flood of others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.engine.scheduling import advance, counts, scheduler, sequence, slots_of

if TYPE_CHECKING:
    from server.engine.scheduler import Scheduler
    from server.engine.sequence import Sequence


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
