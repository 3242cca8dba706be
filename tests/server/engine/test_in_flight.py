"""The scheduler chooses steps while the tokens of the step before are being computed."""

import random
from typing import Any

import pytest

from qwen_serve.server.engine.adapters import TURN
from qwen_serve.server.engine.batch import Batch
from qwen_serve.server.engine.request import TIERS, Request, SchedulingParams
from qwen_serve.server.engine.verification import SampleResult
from tests.server.engine.prefix_cache.world import ANSWER, World
from tests.server.engine.scheduling import scheduler, sequence

END = 5
"""The token that ends an answer."""


class AheadWorld(World):
    """A world on a device: each step is launched before the results of the one before are known, if the
    scheduler finds one."""

    def __init__(self, rng: random.Random, **options: Any) -> None:
        super().__init__(ends=frozenset({END}), **options)
        self.rng, self.ahead = rng, 0
        self.ends: dict[Request, int] = {}
        """After how many tokens an answer ends by itself."""
        self.broken: set[Request] = set()
        """Requests whose logits are never finite."""
        self.in_flight: list[Batch] = []

    def text(self, one: Request, length: int) -> tuple[int, ...]:
        """The first tokens of a request's prompt and answer, those behind its end included."""
        answer = range(length - one.prompt_length)
        return (*one.tokens[: min(length, one.prompt_length)], *(self.token(one, i) for i in answer))

    def token(self, one: Request, i: int) -> int:
        return END if i == self.ends.get(one) else ANSWER + i

    def launch(self) -> bool:
        """Launch a step behind the one that is computed; return whether there is one."""
        batch = self.scheduler.schedule()
        if not batch.chunks:
            assert self.in_flight, "there is work, but nothing was scheduled"
            return False
        if self.in_flight and batch.adapters != self.in_flight[0].adapters:
            return False
        for chunk in batch.chunks:
            held = self.context.held.get(chunk.slot, ())
            assert held == self.text(chunk.sequence, chunk.start), "it goes on from something else"
            self.context.held[chunk.slot] = self.text(chunk.sequence, chunk.start + chunk.count)
        self.computed += batch.n_tokens
        self.scheduler.launched(batch)
        self.in_flight.append(batch)
        return True

    def step(self) -> Batch:
        if not self.in_flight:
            self.launch()
        batch = self.in_flight[0]
        results = [self.result(chunk.sequence) if chunk.samples else SampleResult() for chunk in batch.chunks]
        if batch.n_rows:
            self.ahead += self.launch()
        del self.in_flight[0]
        self.scheduler.commit(batch, results, [chunk.start + chunk.count for chunk in batch.chunks])
        self.check()
        return batch

    def result(self, one: Request) -> SampleResult:
        if one in self.broken or (self.broken and self.rng.random() < 0.01):
            return SampleResult(error=FloatingPointError("not a number"), recompute=True)
        return SampleResult([self.token(one, one.generated)])

    def settle(self) -> None:
        """Commit what is being computed."""
        while self.in_flight:
            launch, self.launch = self.launch, lambda: False  # type: ignore[method-assign]
            self.step()
            self.launch = launch  # type: ignore[method-assign]


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_answers_do_not_depend_on_what_is_known_when_a_step_is_launched(policy: Any) -> None:
    """Requests come, end, leave, are preempted and break; every step goes on from what its slots hold."""
    ahead = 0
    for seed in range(60):
        rng = random.Random(seed)
        world = AheadWorld(
            rng,
            slots=rng.randint(1, 5),
            ids=rng.randint(1, 5),
            total_cells=rng.randint(120, 300),
            batch=rng.choice([16, 64]),
            budget=rng.choice([8, 64]),
            policy=policy,
        )
        made: list[Request] = []
        gone: set[Request] = set()
        arrivals = sorted(rng.randrange(60) for _ in range(rng.randint(1, 14)))
        now = 0
        while arrivals or world.scheduler.running or world.scheduler.waiting or world.in_flight:
            while arrivals and arrivals[0] <= now:
                del arrivals[0]
                shared = range(100 * rng.randrange(3), 400, 7)[: rng.randint(0, 40)]
                asked = SchedulingParams(str(rng.randrange(3)), 1.0, rng.choice(TIERS))
                length = rng.randint(0, 50)
                one = world.add([*shared, *range(1000, 1001 + rng.randint(0, 20))], length, scheduling=asked)
                one.adapters = ((0, 1.0),) * (rng.random() < 0.2)
                if rng.random() < 0.4:
                    world.ends[one] = rng.randint(0, 50)
                if rng.random() < 0.02:
                    world.broken.add(one)
                made.append(one)
            if made and rng.random() < 0.02 and (one := rng.choice(made)).arrival:
                world.settle()  # as the engine does
                world.scheduler.remove(one)
                gone.add(one)
            if world.in_flight or world.scheduler.running or world.scheduler.waiting:
                world.step()
            now += 1
            assert now < 20_000
        for one in made:
            if one in world.broken:
                assert one in gone or isinstance(one.done, FloatingPointError) or not one.generated
            elif one not in gone:
                most, ends = one.limit - one.prompt_length, world.ends.get(one, 1000)
                assert one.tokens[one.prompt_length :] == [ANSWER + i for i in range(min(most, ends))]
                assert one.done == ("stop" if ends < most else "length")
        world.cache.trim()
        assert world.cells.used == world.cells.idle
        ahead += world.ahead
    assert ahead > 60 * 20


def test_a_sequence_that_gets_its_last_token_is_not_in_the_next_step() -> None:
    s = scheduler()
    s.add(short := sequence(4, max_tokens=2))
    s.add(long := sequence(4, max_tokens=20))
    s.launched(first := s.schedule())
    assert (short.pending, short.placeholders, short.room) == (1, 1, 1)
    s.launched(second := s.schedule())
    assert [chunk.start for chunk in second.chunks] == [4, 4]
    s.commit(first, [SampleResult([7]), SampleResult([7])], [4, 4])
    third = s.schedule()
    assert [chunk.sequence for chunk in third.chunks] == [long]
    assert (third.chunks[0].start, long.tokens[4:]) == (5, [7])


def test_a_late_end_is_dropped() -> None:
    s = scheduler(ends=frozenset({END}))
    s.add(one := sequence(4))
    s.add(two := sequence(4))
    s.launched(first := s.schedule())
    s.launched(second := s.schedule())
    s.commit(first, [SampleResult([END]), SampleResult([7])], [4, 4])
    assert (one.done, second.dropped, s.running) == ("stop", {one}, [two])
    s.commit(second, [SampleResult([8]), SampleResult([8])], [5, 5])
    assert (one.tokens[4:], two.tokens[4:]) == ([], [7, 8])


def test_adapters_whose_turn_it_is_go_on_behind_their_own_step() -> None:
    s = scheduler()
    for adapters in ((), ((0, 1.0),)):
        one = sequence(1, max_tokens=40)
        one.adapters = adapters
        s.add(one)
    batch = s.schedule()
    s.launched(batch)
    turns = [batch.adapters]
    while len(turns) < 3 * TURN:
        following = s.schedule()
        if ahead := following.adapters == batch.adapters:
            s.launched(following)
        s.commit(batch, [SampleResult([7])], [batch.chunks[0].start + 1])
        if not ahead:  # the runner would not launch it behind a step of others
            following = s.schedule()
            s.launched(following)
        batch = following
        turns.append(batch.adapters)
    assert turns == [()] * TURN + [((0, 1.0),)] * TURN + [()] * TURN
