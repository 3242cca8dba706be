"""Requests that wait, run and are preempted, with the scheduler and the prefix cache."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_serve.server.engine.request import TIERS, Request, SchedulingParams
from qwen_serve.server.engine.scheduling_policy import WRITTEN, SchedulingPolicy
from tests.server.engine.inside import held
from tests.server.engine.prefix_cache.world import ANSWER, World


@dataclass
class Plan:
    tenant: int
    prompt: int
    answer: int
    arrives: int
    priority: int
    tier: int
    cancelled: int | None


plans = st.builds(
    Plan,
    tenant=st.integers(0, 3),
    prompt=st.integers(1, 80),
    answer=st.integers(1, 60),
    arrives=st.integers(0, 60),
    priority=st.sampled_from([0, 0, 0, -1, 2]),
    tier=st.sampled_from([1, 1, 1, 0, 2]),
    cancelled=st.none() | st.integers(0, 150),
)


@settings(max_examples=150)
@given(
    mix=st.lists(plans, min_size=1, max_size=14),
    slots=st.integers(1, 4),
    ids=st.integers(0, 6),
    cells=st.integers(150, 400),
    policy=st.sampled_from(["priority", "fair"]),
    cleared=st.none() | st.integers(1, 100),
)
def test_who_made_room_goes_on_where_it_was(
    mix: list[Plan], slots: int, ids: int, cells: int, policy: SchedulingPolicy, cleared: int | None
) -> None:
    """`World.step` checks that every sequence is computed on from what its slot holds, or from nothing where
    that was given up, as it is where logits are no use."""
    world = World(slots=slots, ids=ids, total_cells=cells, budget=32, policy=policy)
    made: dict[int, Request] = {}
    gone: set[int] = set()
    now = 0
    while len(made) < len(mix) or world.scheduler.running or world.scheduler.waiting:
        for index, plan in enumerate(mix):
            if plan.arrives <= now and index not in made:
                asked = SchedulingParams(str(plan.tenant), 1.0, TIERS[plan.tier], plan.priority)
                made[index] = world.add([plan.tenant, *range(plan.prompt)], plan.answer, scheduling=asked)
                made[index].adapters = ((0, 1.0),) * (plan.tenant == 0)  # a step is of those with the same
            one = made.get(index)
            if plan.cancelled == now and one is not None and one.arrival:
                world.scheduler.remove(one)
                gone.add(index)
        if now == cleared:
            world.cache.clear()
        if world.scheduler.running or world.scheduler.waiting:
            chunks = world.step().chunks
            assert len({chunk.sequence.adapters for chunk in chunks}) == 1
        now += 1
        assert now < 20_000
    for index, plan in enumerate(mix):
        if index not in gone:
            answer = made[index].tokens[made[index].prompt_length :]
            assert answer == [ANSWER + number for number in range(plan.answer)]
    assert all(not node.refcount for node in held(world.cache))


def test_a_slot_changes_hands_without_reading_anything_again() -> None:
    world = World(slots=2, ids=8, policy="fair")
    flood = [world.add(range(start, start + 50), 60, scheduling=SchedulingParams("a")) for start in (0, 100)]
    for _ in range(20):
        world.step()
    short = world.add(range(200, 210), 4, scheduling=SchedulingParams("b"))
    for _ in range(8):
        world.step()
    assert short.generated == 4
    assert world.scheduler.preemptions == 1
    world.finish()
    assert world.computed == sum(len(one.tokens) - 1 for one in (*flood, short))


def test_who_makes_room_gives_up_its_own_checkpoint_where_there_is_no_other() -> None:
    world = World(slots=1, ids=1, policy="fair")
    long = world.add(range(50), 40, scheduling=SchedulingParams("a", service_tier="flex"))
    for _ in range(10):
        world.step()
    assert [node.depth for node in held(world.cache)] == [49]
    short = world.add(range(100, 110), 4, scheduling=SchedulingParams("b"))
    world.step()
    assert world.scheduler.running == [short]
    assert [node.depth for node in held(world.cache)] == [long.prompt_length + long.generated - 1]
    world.finish()
    assert world.computed == len(long.tokens) - 1 + len(short.tokens) - 1


def test_why_a_request_waited_is_told() -> None:
    world = World(slots=2, ids=8, policy="fair")
    first = world.add(range(100), 40)
    leader = world.add(range(200, 240), 10, salt="s", scheduling=SchedulingParams("b"))
    follower = world.add(range(200, 260), 10, salt="s", scheduling=SchedulingParams("b"))
    third = world.add(range(300, 310), 4, scheduling=SchedulingParams("b"))
    fourth = world.add(range(400, 410), 4, scheduling=SchedulingParams("c"))
    world.finish()
    told = [one.timings.waited_for for one in (first, leader, follower, third, fourth)]
    assert told == ["", "", "its tenant's others", "its tenant's others", "a slot"]
    small = World(slots=2, ids=8, total_cells=200)
    small.add(range(100), 40)
    large = small.add(range(300, 400), 40)
    small.finish()
    assert large.timings.waited_for == "KV cells"
    growing = World(slots=2, ids=8, total_cells=250)
    growing.add(range(20), 200)
    younger = growing.add(range(100, 120), 200)
    growing.finish()
    assert younger.timings.preempted
    assert younger.timings.waited_for == "", "it started at once; what came later is not its queueing time"
    together = World(slots=2, ids=8)
    together.add(range(64), 4)
    second = together.add(range(80), 4)
    together.finish()
    assert second.timings.waited_for == "a prefix"


def test_where_no_state_can_be_kept_nobody_who_has_begun_makes_room_for_a_slot() -> None:
    world = World(slots=1, ids=0, policy="fair")
    long = world.add(range(50), 20, scheduling=SchedulingParams("a", service_tier="flex"))
    world.step()
    world.step()
    world.add(range(5), 4, scheduling=SchedulingParams("b"))
    world.step()
    assert world.scheduler.running == [long]


def test_what_was_served_never_falls_where_a_prompt_is_found_in_the_cache() -> None:
    world = World(slots=1, ids=4)
    served = [0.0]
    for _ in range(3):
        world.add(range(100), 4)
        while world.scheduler.running or world.scheduler.waiting:
            served.append(world.scheduler.waiting.policy.served["default"])
            world.scheduler.waiting.policy.charge((*world.scheduler.running, *world.scheduler.waiting)[0])
            world.step()
    counters = world.scheduler.waiting.policy
    assert served == sorted(served)
    assert counters.served["default"] == 100 + 2 * 1 + 3 * 4 * WRITTEN
