"""Any mix of requests is served in order, without starvation or delay by a flood of other requests."""

from dataclasses import dataclass, field
from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_serve.server.engine.reproducible import Reproducible
from qwen_serve.server.engine.request import Request
from qwen_serve.server.engine.scheduler import Scheduler
from qwen_serve.server.engine.scheduling_policy import SchedulingPolicy
from tests.server.engine.scheduling import advance, commit, counts, scheduler, sequence, used


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
    ubatch: int
    admitted: list[Request] = field(default_factory=list)
    held_up: dict[Request, int] = field(default_factory=dict)
    """Those who wait, and the prompt tokens of the steps since they could decode."""

    def step(self) -> None:
        oldest = self.s.running[0] if self.s.running else None
        before = self.s.preemptions
        step = self.s.schedule()
        assert step.chunks, "there is work, but nothing was scheduled"
        assert step.n_tokens == sum(counts(step)) <= self.batch
        assert step.n_rows == sum(chunk.samples for chunk in step.chunks)
        in_step = {chunk.sequence for chunk in step.chunks}
        assert len(in_step) == len(step.chunks)
        assert all(chunk.samples == (chunk.count == chunk.sequence.pending) for chunk in step.chunks)
        assert all(chunk.start == chunk.sequence.computed for chunk in step.chunks)
        decoding = {x for x in self.s.running if x.ready}
        assert in_step == decoding or not in_step & decoding, "decodes and prompts in one step"
        if self.s.preemptions != before:
            self.held_up = {}
        self.held_up = {x: self.held_up.get(x, 0) + step.n_tokens for x in decoding - in_step}
        assert all(tokens <= self.budget for tokens in self.held_up.values()), "a running stream was held up"
        assert in_step & decoding or step.n_tokens <= self.ubatch
        assert oldest is None or oldest in self.s.running, "the oldest was preempted"
        slots = [x.slot for x in self.s.running]
        assert None not in slots
        assert len(set(slots)) == len(slots)
        self.admitted += [x for x in self.s.running if x not in self.admitted]
        commit(self.s, step)
        assert used(self.s) == sum(x.computed for x in self.s.running) <= self.s._cells.total  # noqa: SLF001 - as used()


@settings(max_examples=150)
@given(
    mix=st.lists(plans, min_size=1, max_size=12),
    slots=st.integers(1, 5),
    cells=st.integers(120, 300),
    batch=st.integers(5, 64),
    budget=st.integers(1, 64),
    ubatch=st.integers(1, 64),
    policy=st.sampled_from(get_args(SchedulingPolicy)),
)
def test_every_mix_of_requests_is_served_in_order(
    mix: list[Plan], slots: int, cells: int, batch: int, budget: int, ubatch: int, policy: SchedulingPolicy
) -> None:
    """For one tenant without priorities, with any policy."""
    s = scheduler(slots=slots, cells=cells, batch=batch, budget=budget, ubatch=ubatch, policy=policy)
    watched = Watched(s, batch, budget, ubatch)
    sequences = [sequence(plan.prompt, plan.answer) for plan in mix]
    cancelled: set[Request] = set()
    arrived: list[Request] = []
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
    assert used(s) == 0
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
        advance(s)
        assert stream.generated >= generated + 1
    assert all(one.generated == 2 for one in flood)


def test_half_of_the_budget_is_the_oldest_prompt_s_and_the_rest_the_shortest_one_s() -> None:
    s = scheduler(batch=64, budget=16)
    s.add(sequence(2, max_tokens=100))
    advance(s)
    s.add(sequence(200))
    s.add(sequence(100))
    s.add(sequence(12))
    assert [counts(advance(s)) for _ in range(5)] == [[8, 8], [1], [12, 4], [1, 1], [8, 8]]


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
    for _ in range(8):
        advance(s)
    assert short.generated >= 1


def test_a_long_prompt_is_not_starved_by_a_flood_of_short_ones() -> None:
    s = scheduler(slots=4, cells=4000, batch=64, budget=16)
    s.add(sequence(4, max_tokens=400))
    advance(s)
    s.add(long := sequence(200))
    for turn in range(1, 25):
        s.add(sequence(10, max_tokens=1))
        advance(s)
        advance(s)
        assert long.computed >= 8 * turn


def test_decodes_and_prompts_take_turns() -> None:
    s = scheduler(slots=4, batch=64, budget=16)
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
    s = scheduler()
    s.add(stream := sequence(1, max_tokens=20))
    for n in range(20):
        assert stream.generated == n
        advance(s)


def test_every_tenant_s_shortest_prompt_comes_before_another_s_second() -> None:
    s = scheduler(slots=8, cells=4000, batch=64, budget=64, policy="fair")
    s.add(sequence(4, max_tokens=400))
    advance(s)
    s.add(sequence(600, tenant="a"))
    for _ in range(4):
        s.add(sequence(30, tenant="a"))
    s.add(other := sequence(32, tenant="b"))
    assert other in [chunk.sequence for _ in range(3) for chunk in advance(s).chunks]


def test_a_reproducible_short_prompt_is_not_stuck_behind_a_long_one() -> None:
    s = scheduler(slots=4, cells=4000, batch=64, budget=64, reproducible=Reproducible(chunk=16))
    s.add(long := sequence(1000))
    advance(s)
    s.add(short := sequence(40))
    for _ in range(12):
        advance(s)
    assert short.generated
    assert long.computed >= 64
