"""The scheduling policies without a model: shares of tenants, preemption, and no starvation."""

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest

from qwen_serve.server.engine.request import TIERS, Request
from qwen_serve.server.engine.request_queue import RequestQueue
from qwen_serve.server.engine.scheduling_policy import AGEING, WRITTEN, SchedulingPolicy
from tests.server.engine.scheduling import sequence


@dataclass
class Simulation:
    """A server in which a step writes a token of each request that runs, and who made room goes on where it
    was."""

    policy: SchedulingPolicy
    slots: int
    running: list[Request] = field(default_factory=list)
    served: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Prompt tokens' worth of what each tenant got."""
    waited: dict[Request, int] = field(default_factory=dict)
    """Steps until its first token."""
    came: dict[Request, int] = field(default_factory=dict)
    step: int = 0
    preemptions: int = 0

    def __post_init__(self) -> None:
        self.queue = RequestQueue(self.policy, self.running)

    def add(self, tenant: str, prompt: int = 8, answer: int = 16, **scheduling: Any) -> Request:
        one = sequence(prompt, answer, tenant=tenant, **scheduling)
        self.came[one] = self.step
        self.queue.add(one)
        return one

    def _admit(self) -> None:
        while self.queue:
            if len(self.running) < self.slots:
                one = self.queue.peek()
            elif found := self.queue.preemption(lambda _: True):
                one, victim = found
                self.running.remove(victim)
                victim.slot = None
                self.queue.add(victim)
                self.preemptions += 1
            else:
                return
            self.queue.pop(one, 0)
            if one not in self.waited:
                self.served[one.scheduling.tenant] += one.prompt_length
                self.waited[one] = self.step - self.came[one]
            self.running.append(one)

    def advance(self, steps: int = 1) -> None:
        for _ in range(steps):
            self._admit()
            self.queue.steps += 1
            for one in self.running.copy():
                self.served[one.scheduling.tenant] += WRITTEN
                one.extend([7], frozenset())
                if one.done:
                    self.queue.discard(one)
                    self.running.remove(one)
            self.step += 1


def test_thousands_of_tenants_are_never_apart_by_more_than_their_requests_in_flight() -> None:
    rng = random.Random(7)
    simulation = Simulation("fair", slots=64)
    tenants = [f"{number}" for number in range(2000)]
    for tenant in tenants:
        for _ in range(1 + 50 * (tenant == "0")):
            simulation.add(tenant, rng.randrange(1, 400), rng.randrange(1, 24))
    dearest = 400 + WRITTEN * 24
    while simulation.queue:
        backlogged = [simulation.served[one.scheduling.tenant] for one in simulation.queue]
        assert max(simulation.served.values(), default=0.0) - min(backlogged) <= 2 * dearest
        simulation.advance(20)
    assert len(simulation.waited) == 2050
    last = sorted(simulation.waited, key=lambda one: simulation.waited[one])[-40:]
    assert {one.scheduling.tenant for one in last} == {"0"}, "whoever asks for more waits for it"


@pytest.mark.parametrize("slots", [1, 8, 64])
def test_two_tenants_get_the_same_whatever_they_ask_for(slots: int) -> None:
    simulation = Simulation("fair", slots)
    for _ in range(400):
        simulation.add("long", 300, 100)
        simulation.add("short", 10, 5)
        simulation.add("short", 10, 5)
    for _ in range(20):
        simulation.advance(max(1, 2000 // slots))
        left = Counter(one.scheduling.tenant for one in simulation.queue)
        if not (left["long"] and left["short"]):
            break
        apart = abs(simulation.served["long"] - simulation.served["short"])
        assert apart <= slots * (300 + 100 * WRITTEN)
    assert simulation.step > 4


def test_one_request_beside_hundreds_of_another_tenant_gets_a_slot_at_once() -> None:
    simulation = Simulation("fair", slots=8)
    for _ in range(200):
        simulation.add("flood", 2048, 512)
    simulation.advance(100)
    for _ in range(10):
        short = simulation.add("other", 64, 32)
        simulation.advance(50)
        assert simulation.waited[short] == 0
        assert short.generated == 32
    assert simulation.preemptions == 10


def test_a_request_that_has_to_wait_for_its_turn_does_not_wait_for_the_end_of_an_answer() -> None:
    simulation = Simulation("fair", slots=4)
    for _ in range(5):
        simulation.add("bulk", 8, 5000)
    simulation.advance(10)
    dear = simulation.add("other", 2000, 8)
    simulation.advance(20)
    assert dear.generated == 8
    second = simulation.add("other", 8, 8)
    simulation.advance(500)  # in less than 300 steps the one has written what the other has read
    assert second.generated == 8


def test_nine_tenants_lose_nothing_to_a_hostile_tenth() -> None:
    def polite(hostile: bool) -> dict[str, float]:
        simulation = Simulation("fair", slots=20)
        if hostile:
            for _ in range(500):
                simulation.add("hostile", 500, 300)
        for _ in range(300):
            for number in range(9):
                if not any(one.scheduling.tenant == str(number) for one in simulation.running):
                    simulation.add(str(number), 60, 30)
            simulation.advance(10)
        return simulation.served

    alone, beside = polite(hostile=False), polite(hostile=True)
    for number in range(9):
        assert beside[str(number)] >= 0.95 * alone[str(number)]


def test_a_share_is_a_multiple_of_what_others_get() -> None:
    simulation = Simulation("fair", slots=8)
    for _ in range(600):
        simulation.add("three", 20, 20, share=3.0)
        simulation.add("one", 20, 20)
    simulation.advance(1000)
    assert 2.6 < simulation.served["three"] / simulation.served["one"] < 3.4


def test_nobody_owes_for_what_it_got_alone() -> None:
    simulation = Simulation("fair", slots=8)
    for _ in range(16):
        simulation.add("alone", 8, 5000)
    simulation.advance(1000)
    before = simulation.served["alone"]
    for _ in range(300):
        simulation.add("new", 50, 50)
    simulation.advance(300)
    assert simulation.served["alone"] - before == pytest.approx(simulation.served["new"], rel=0.1)


def test_a_newcomer_does_not_wait_for_what_a_small_share_has_cost() -> None:
    simulation = Simulation("fair", slots=2)
    simulation.add("small", 300, 100, share=0.01)
    for _ in range(200):
        simulation.add("busy", 30, 10)
    simulation.advance(100)
    newcomer = simulation.add("new", 30, 10)
    simulation.advance(60)
    assert newcomer.generated == 10


def test_who_was_idle_has_no_credit() -> None:
    simulation = Simulation("fair", slots=1)
    first = simulation.add("late", 10, 10)
    for _ in range(100):
        simulation.add("busy", 10, 10)
    simulation.advance(400)
    assert simulation.waited[first] == 0
    for _ in range(100):
        simulation.add("late", 10, 10)
    before = simulation.served.copy()
    simulation.advance(300)
    gained = {name: simulation.served[name] - before[name] for name in before}
    assert abs(gained["late"] - gained["busy"]) <= 2 * (10 + 10 * WRITTEN)


def test_nothing_is_kept_of_tenants_that_are_gone() -> None:
    simulation = Simulation("fair", slots=4)
    for number in range(1000):
        simulation.add(f"{number}", 10, 2)
        simulation.advance(1)
    simulation.advance(10)
    simulation.add("last")
    assert len(simulation.queue.policy._tenants) <= 20  # noqa: SLF001 - memory


def test_a_stream_of_newcomers_leaves_nothing_behind_and_keeps_nobody_waiting_for_ever() -> None:
    simulation = Simulation("fair", slots=2)
    for _ in range(3):
        simulation.add("old", 200, 200)
    simulation.advance(150)
    late = simulation.add("old", 8, 8)
    newcomers = 0
    for _ in range(3000):
        while len(simulation.queue) < 20:
            simulation.add(f"{newcomers}", 8, 2)
            newcomers += 1
        simulation.advance(1)
    assert newcomers > 1000
    assert late.generated == 8
    assert len(simulation.queue.policy._tenants) <= 100  # noqa: SLF001 - memory


def test_who_used_what_others_left_owes_nothing_for_it() -> None:
    simulation = Simulation("fair", slots=8)
    for _ in range(600):
        simulation.add("batch", 50, 50)
    chat = simulation.add("chat", 5, 200)
    for _ in range(200):
        if chat.generated >= 180:  # never idle, and never asks for its share
            chat = simulation.add("chat", 5, 200)
        simulation.advance(5)
    before = simulation.served["batch"]
    for _ in range(300):
        simulation.add("new", 50, 50)
    simulation.advance(300)
    assert simulation.served["batch"] - before == pytest.approx(simulation.served["new"], rel=0.1)


@pytest.mark.parametrize("policy", ["priority", "fair"])
def test_the_lower_priority_number_comes_first_then_who_came_first(policy: SchedulingPolicy) -> None:
    simulation = Simulation(policy, slots=1)
    blocker = simulation.add("a", 4, 4, priority=-9)
    simulation.advance(1)
    asked = [3, 0, -2, 0, 3]
    waiting = [simulation.add("a", 4, 4, priority=priority) for priority in asked]
    simulation.advance(40)
    assert blocker.generated == 4
    order = sorted(waiting, key=lambda one: simulation.waited[one] + simulation.came[one])
    assert [one.scheduling.priority for one in order] == [-2, 0, 0, 3, 3]
    assert waiting.index(order[1]) < waiting.index(order[2])


@pytest.mark.parametrize("policy", ["priority", "fair"])
@pytest.mark.parametrize("better", [{"priority": -5}, {"service_tier": "priority"}])
def test_a_stream_of_better_requests_keeps_nobody_waiting_for_ever(
    policy: SchedulingPolicy, better: dict[str, Any]
) -> None:
    simulation = Simulation(policy, slots=2)
    poor = [simulation.add("b", 4, 8) for _ in range(5)]
    for _ in range(400):
        simulation.add("b" if "priority" in better else "a", 4, 4, **better)
        simulation.advance(1)
        if all(one.generated == 8 for one in poor):
            break
    assert all(one.generated == 8 for one in poor)
    assert max(simulation.waited[one] for one in poor) <= 5 * AGEING * 4


def test_a_better_tier_takes_the_slot_of_a_worse_one_and_not_the_other_way_round() -> None:
    simulation = Simulation("fair", slots=2)
    flex = [simulation.add("a", 4, 40, service_tier="flex") for _ in range(2)]
    simulation.advance(5)
    better = simulation.add("b", 4, 40)
    best = simulation.add("c", 4, 40, service_tier="priority")
    simulation.advance(1)
    assert {*simulation.running} == {better, best}
    simulation.add("d", 4, 4, service_tier="flex")
    simulation.advance(1)
    assert {*simulation.running} == {better, best}
    simulation.advance(100)
    assert all(one.generated == 40 for one in (*flex, better, best))
    assert [simulation.queue.policy.served[tier] for tier in TIERS] == [84, 84, 180]


def test_first_come_first_served_knows_neither_tenants_nor_priorities() -> None:
    simulation = Simulation("fcfs", slots=1)
    simulation.add("a", 4, 20)
    simulation.advance(1)
    order = [
        simulation.add("a", 4, 4),
        simulation.add("b", 4, 4, priority=-7),
        simulation.add("c", 4, 4, service_tier="priority"),
    ]
    simulation.advance(40)
    assert simulation.preemptions == 0
    assert [simulation.waited[one] for one in order] == [19, 23, 27]


def test_a_written_token_costs_what_steps_have_shown() -> None:
    simulation = Simulation("fair", slots=1)
    for _ in range(1000):
        simulation.queue.policy.decoded(
            tokens=8, seconds=0.004, each=0.0001
        )  # 0.5 ms a token, 0.1 ms in a prompt
    simulation.add("a", 10, 10)
    simulation.advance(10)
    assert simulation.queue.policy.served["default"] == pytest.approx(10 + 10 * 5, rel=0.01)
