"""The choice in motion: a pretend head on a made-up card is used as far as it is right, and tried again."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from server.engine.scheduler import Step
from server.engine.sequence import Sequence
from server.engine.speculation.base import Floors, Order
from server.engine.speculation.ngram import NgramDrafter
from server.engine.speculation.plan import Planner
from server.engine.speculation.speculator import PAUSE, PROBE_FIRST, Speculator
from server.engine.speculation.times import DraftTimes, StepTimes
from tests.server.engine.speculation.helpers import sequence


class Head:
    """Drafts that are right with a chance of `right`, and always sure of themselves."""

    name = "mtp"

    def __init__(self) -> None:
        self.right = 1.0
        self.rounds = 0

    def can_draft(self, one: Sequence) -> bool:
        return True

    def wants(self, one: Sequence, end: int) -> bool:
        return False

    def propose(self, orders: list[Order], floors: Floors | None = None) -> None:
        for order in orders:
            order.tokens, order.sure, order.drafter = [1] * order.limit, [1.0] * order.limit, self.name
        self.rounds += max(order.limit for order in orders)

    def collect(self, slot: int, start: int, rows: np.ndarray) -> None:
        pass

    def ahead(self, slot: int, depth: int) -> None:
        pass

    def forget(self, one: Sequence) -> None:
        pass


def seconds(rows: int) -> float:
    """Of a step on the card."""
    return 1e-3 * (3.4 + 0.2 * rows)


class World:
    """Steps of sequences that decode, on a clock of its own; what is drafted is right by a die."""

    def __init__(self, n: int = 1, *, ngram: bool = False, draft: float = 0.6e-3) -> None:
        times, draft_times = StepTimes(), DraftTimes()
        for rows in (1, 2, 4, 8, 16, 64, 256):
            times.add(1, rows, seconds(rows))
        draft_times.add(1, draft)
        self.head, self.rng, self.draft = Head(), random.Random(0), draft
        rollback = SimpleNamespace(save=lambda *_: None, restore=lambda *_: None, held=lambda _: 0)
        self.speculator = Speculator(
            cast("Any", SimpleNamespace(hidden=lambda n: np.zeros((n, 1), np.float32))),
            cast("Any", rollback),
            Planner(times, draft_times),
            times,
            ngram=NgramDrafter() if ngram else None,
            mtp=cast("Any", self.head),
            slots=16,
            longest=64,
            deepest=8,
            most_rows=128,
        )
        self.sequences = [sequence([self.rng.randrange(10**5) for _ in range(20)], 10**6) for _ in range(n)]
        for slot, one in enumerate(self.sequences):
            one.slot, one.cached = slot, len(one.tokens) - 1
        self.clock = 0.0
        self.tokens = 0
        self.surprise = 1.0
        """How much longer than planned a step with more than one token of a sequence takes."""

    def step(self) -> int:
        """Tokens drafted."""
        rounds = self.head.rounds
        drafts = self.speculator.propose(self.sequences, 2000)
        step, sampled = Step(), []
        for one, draft in zip(self.sequences, drafts, strict=True):
            step.add(one, one.pending, draft)
            right = 0
            while right < len(draft) and self.rng.random() < self.head.right:
                right += 1
            sampled.append([*draft[:right], self.rng.randrange(10**5)])
        spent = seconds(step.n_tokens) * (self.surprise if step.n_tokens > len(sampled) else 1)
        self.speculator.prepare(step)
        places = [[0] * chunk.n_tokens for chunk in step.chunks]
        self.speculator.conclude(step, places, sampled, spent)
        self.clock += spent + (self.head.rounds - rounds) * self.draft
        for one, draft, new in zip(self.sequences, drafts, sampled, strict=True):
            one.tokens += new
            if len(new) - 1 == len(draft):
                one.cached = len(one.tokens) - 1
        self.tokens += sum(map(len, sampled))
        return sum(map(len, drafts))

    def rate(self, steps: int) -> float:
        """Tokens a second over so many steps, beside those of no speculation."""
        clock, tokens = self.clock, self.tokens
        for _ in range(steps):
            self.step()
        plain = len(self.sequences) / seconds(len(self.sequences))
        return (self.tokens - tokens) / (self.clock - clock) / plain


@pytest.mark.parametrize(("right", "least"), [(1.0, 2.0), (0.9, 1.4), (0.8, 1.15), (0.3, 0.97), (0.0, 0.97)])
def test_it_gains_where_there_is_something_to_gain_and_loses_nothing_else(right: float, least: float) -> None:
    world = World()
    world.head.right = right
    world.rate(60)  # to learn
    assert world.rate(400) >= least


def test_a_head_that_was_bad_is_tried_again() -> None:
    world = World()
    world.head.right = 0.0
    for _ in range(100):
        world.step()
    drafts = [world.step() for _ in range(4 * PROBE_FIRST)]
    assert 0 < sum(bool(n) for n in drafts) <= 4, "now and then, one token"
    assert max(drafts) == 1
    world.head.right = 1.0
    for _ in range(3000):
        world.step()
    assert world.rate(50) > 1.5


def test_a_head_that_costs_too_much_is_not_even_tried() -> None:
    world = World(draft=20e-3)
    assert sum(world.step() for _ in range(1000)) == 0


@pytest.mark.parametrize("n", [1, 8])
def test_plans_that_do_not_keep_what_they_promise_are_given_up(n: int) -> None:
    world = World(n)
    world.head.right, world.surprise = 0.8, 3.0
    world.rate(50)
    assert world.rate(3000) > 0.93


def test_a_crowd_is_looked_at_less_and_less_and_then_left_alone() -> None:
    world = World(8, draft=20e-3)
    asked = 0
    choose = world.speculator._planner.choose

    def counted(*arguments: Any) -> Any:
        nonlocal asked
        asked += 1
        return choose(*arguments)

    world.speculator._planner.choose = counted  # type: ignore[method-assign]
    for _ in range(20 * PAUSE):
        assert world.step() == 0
    assert asked < 40
    assert sum(World(17).step() for _ in range(50)) == 0


def test_several_sequences_draft_together() -> None:
    world = World(4)
    world.rate(60)
    lengths = set()
    for _ in range(50):
        pending = [one.pending for one in world.sequences]
        drafts = world.speculator.propose(world.sequences, 2000)
        lengths.add(len({own + len(draft) for own, draft in zip(pending, drafts, strict=True)}))
    assert lengths == {1}, "one number of tokens, one pass"


def test_text_that_repeats_is_drafted_without_the_head() -> None:
    world = World(ngram=True)
    [one] = world.sequences
    one.tokens[:] = [7, 8, 9, 10] * 30
    one.cached = len(one.tokens) - 1
    [draft] = world.speculator.propose(world.sequences, 2000)
    assert draft == ([7, 8, 9, 10] * 30)[: len(draft)]
    assert len(draft) > 10
    assert world.head.rounds == 0
