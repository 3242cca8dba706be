"""The choice in motion, on a made-up card: the head is used as far as it pays, and tried again where not."""

from __future__ import annotations

import random
from itertools import pairwise
from statistics import fmean
from typing import Any
from unittest.mock import Mock

import pytest

from server.engine.speculation.acceptance import Confidence
from server.engine.speculation.base import COPIED, Floors, Order
from server.engine.speculation.choice import LISTENS, PAUSE_LAST, PROBE_FIRST
from tests.server.engine.speculation.card import ANYONE, World, h200

BUILD = 2.8e-3
"""Seconds that a pass takes longer where the graph for it is not there, as on the H200."""


def on_h200(n: int = 1, **changes: Any) -> World:
    return World(n, **{"table": h200, "build": BUILD, "snapshots": 8, "deepest": 16, **changes})


def counted_choices(world: World) -> Mock:
    """The planner's `choose`, which counts from now on how often it is asked."""
    planner: Any = world.speculator._planner
    planner.choose = Mock(wraps=planner.choose)
    return planner.choose


# --- one sequence ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("snapshots", [4, 8])
@pytest.mark.parametrize("right", [1.0, 0.9, 0.8, 0.6])
def test_it_comes_near_the_best_depth_within_some_tens_of_steps(
    right: float, snapshots: int, seed: int
) -> None:
    world = on_h200(snapshots=snapshots, seed=seed)
    world.head.right = right
    best, depth = world.best(right, range(snapshots + 1))
    world.gain(80)
    built = world.card.graphs_built
    gain = world.gain(1000)
    assert gain > 0.93 * best
    if right == 1.0:
        assert len(set(world.lengths[-500:])) == 1
        assert world.lengths[-1] >= depth == snapshots, "so sure drafts are worth a graph each"
    else:
        assert world.card.graphs_built - built < 80, "the depth changes all the time"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("snapshots", [0, 4, 8])
@pytest.mark.parametrize("right", [0.3, 0.1, 0.0])
def test_a_bad_head_costs_less_than_three_per_cent(right: float, snapshots: int, seed: int) -> None:
    world = on_h200(snapshots=snapshots, seed=seed)
    world.head.right = right
    assert world.gain(500) > 0.97
    assert world.gain(1000) > 0.98


def test_a_draft_in_a_hundred_that_must_build_its_graph_is_not_worth_it() -> None:
    """With neither snapshots nor copies a draft builds two: only a head that is nearly always right may."""
    world = on_h200(snapshots=0, copies=False)
    world.head.right = 0.6
    world.gain(1000)
    assert sum(map(bool, world.lengths)) < 20
    world = on_h200(snapshots=0, copies=False)
    world.gain(100)
    assert world.gain(400) > 2


@pytest.mark.parametrize("right", [1.0, 0.9, 0.8])
def test_a_copy_of_the_state_is_worth_more_than_a_graph(right: float) -> None:
    gains = []
    for copies in (False, True):
        world = on_h200(snapshots=2, copies=copies)
        world.head.right = right
        world.gain(100)
        built = world.card.graphs_built
        gains.append(world.gain(1000))
    assert world.card.graphs_built - built < 200
    assert gains[1] > (1.1 if right == 1.0 else 0.93) * gains[0]


def test_nothing_is_copied_where_graphs_are_built_faster() -> None:
    world = on_h200(build=0.3e-3)
    assert world.speculator._rollback.keeps_shape(0, 1) == 8
    world.card.stash = Mock(side_effect=AssertionError)
    world.gain(300)


def test_steady_times_are_learnt_at_the_start_and_graphs_are_booked_apart() -> None:
    world = on_h200()
    times = world.speculator.times
    for rows in (1, 2, 9):
        assert float(times.of(1, rows)) == pytest.approx(h200(1, rows))
    assert times.building.value == pytest.approx(BUILD)
    world.head.right = 0.8
    world.gain(300)
    for rows in (1, 2, 5):
        assert float(times.of(1, rows)) == pytest.approx(h200(1, rows), rel=0.02)
    assert times.building.value == pytest.approx(BUILD, rel=0.02)


@pytest.mark.parametrize(("right", "least"), [(1.0, 2.0), (0.9, 1.4), (0.8, 1.15), (0.3, 0.97), (0.0, 0.97)])
def test_it_gains_where_there_is_something_to_gain_and_loses_nothing_else(right: float, least: float) -> None:
    world = World()
    world.head.right = right
    world.gain(60)  # to learn
    assert world.gain(400) >= least


def test_a_modest_head_is_judged_by_what_it_gets_right() -> None:
    world = on_h200()
    world.head.sure = 0.01
    world.gain(100)
    assert world.gain(200) > 3


def test_a_head_that_was_bad_is_tried_again() -> None:
    world = on_h200()
    world.head.right = 0.0
    world.gain(100)
    drafts = [world.step() for _ in range(4 * PROBE_FIRST)]
    assert 0 < sum(bool(n) for n in drafts) <= 12, "now and then"
    world.head.right = 1.0
    world.gain(600)
    assert world.gain(50) > 3


def test_a_head_that_costs_too_much_is_not_even_tried() -> None:
    world = on_h200(draft=20e-3)
    assert sum(world.step() for _ in range(1000)) == 0


def test_who_rests_is_not_planned_for() -> None:
    world = on_h200()
    world.head.right = 0.0
    choose = counted_choices(world)
    world.gain(2000)
    assert choose.call_count < 60


def test_a_card_that_is_slow_at_first_is_not_thought_slow_for_ever() -> None:
    """Clocks rise, another program starts beside it: every shape is measured again later."""
    calls = 0

    def rising(n: int, length: int) -> float:
        nonlocal calls
        calls += 1
        return h200(n, length) * (4 if calls < 50 else 1)

    times = World(table=rising, build=2e-3, snapshots=8).speculator.times
    for length in (1, 2, 3, 5, 9):
        assert times.of(1, length) == pytest.approx(h200(1, length), rel=0.02)
    assert times.of(8, 1) == pytest.approx(h200(8, 1), rel=0.02)
    assert times.building.value == pytest.approx(2e-3, rel=0.05)


def test_nothing_is_kept_for_a_head_that_rests_for_long() -> None:
    world = on_h200()
    world.head.right = 0.0
    world.gain(100)
    assert world.card.keeps_hidden, "it will be tried again soon"
    world.gain(400)
    kept, drafted = [], []
    for _ in range(2000):
        kept.append(world.card.keeps_hidden)
        drafted.append(bool(world.step()))
    assert sum(kept) < 0.25 * len(kept)
    first = drafted.index(True)
    assert all(kept[first - LISTENS + 1 : first + 1]), "it has read some text when it is tried again"
    assert sum(a != b for a, b in pairwise(kept)) < 12, "each change builds a graph"
    world.head.right = 1.0
    world.gain(4000)
    assert world.gain(100) > 3
    assert world.card.keeps_hidden


@pytest.mark.parametrize("right", [0.9, 0.8, 0.7, 0.6])
def test_a_graph_that_is_captured_is_worth_staying_with(right: float) -> None:
    """The second step of a shape costs more than the first: with CUDA, where it is captured."""
    world = on_h200(snapshots=2, build=2.3e-3, capture=5e-3)
    assert world.speculator.times.capturing.value == pytest.approx(5e-3)
    assert float(world.speculator.times.of(1, 3)) == pytest.approx(h200(1, 3))
    world.head.right = right
    best, _ = world.best(right, range(3))
    world.gain(150)
    assert world.gain(1000) > 0.88 * best


@pytest.mark.parametrize(("right", "least"), [(0.9, 1.4), (0.8, 1.25), (0.7, 1.1), (0.3, 0.95), (0.0, 0.95)])
def test_what_a_request_takes_once_does_not_condemn_the_head(right: float, least: float) -> None:
    """Each of eight requests has the head read a prompt, which takes as long as four tokens, and comes to its
    graphs anew."""
    world = on_h200(snapshots=2, build=2.9e-3, capture=5e-3)
    world.head.right = right
    propose, reads = world.head.propose, True

    def reading(orders: list[Order], floors: Floors | None = None) -> None:
        nonlocal reads
        world.card.now += 15e-3 if reads else 0.0
        world.head.read_a_prompt, reads = reads, False
        propose(orders, floors)

    world.head.propose = reading  # type: ignore[method-assign]
    gains = []
    for _ in range(8):
        world.speculator.forget(world.sequences[0])
        world.sequences = [world.newcomer(0)]
        world.card.keep_hidden(world.card.keeps_hidden)  # what comes next builds a graph
        reads = True
        gains.append(world.gain(250))
    assert fmean(gains) > least
    assert min(gains) > 0.9


def test_an_early_error_far_down_does_not_keep_drafts_short_for_ever() -> None:
    confidence, experience = Confidence(), Confidence()
    for one in (confidence, experience):
        one.add([1.0, 1.0], 1)
    early = confidence.chances(experience, 2)
    for _ in range(100):
        for one in (confidence, experience):
            one.add([1.0], 1)
    late = confidence.chances(experience, 2)
    assert early[1] < 0.7
    assert late[1] > 0.9


@pytest.mark.parametrize("n", [2, 8, 17])
def test_nothing_is_kept_in_a_crowd_that_would_not_draft(n: int) -> None:
    world = on_h200(n)
    world.gain(2)
    assert not world.card.keeps_hidden
    one, *others = world.sequences
    for other in others:
        world.speculator.forget(other)
    world.sequences = [one]
    world.step()
    assert world.card.keeps_hidden


# --- several -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 8])
def test_plans_that_do_not_keep_what_they_promise_are_given_up(n: int) -> None:
    world = World(n)
    world.head.right = 0.8
    planned = world.card.table
    world.card.table = lambda n, length: planned(n, length) * (3 if length > 1 else 1)
    world.gain(50)
    assert world.gain(3000) > 0.93


@pytest.mark.parametrize("right", [1.0, 0.7, 0.3])
@pytest.mark.parametrize("n", [2, 8, 16, 64])
def test_a_crowd_that_it_would_slow_down_is_left_alone(n: int, right: float) -> None:
    world = on_h200(n, draft=0.7e-3)
    world.head.right = right
    assert world.gain(500) > 0.99


@pytest.mark.parametrize("right", [0.7, 0.3])
def test_a_crowd_that_is_slower_than_the_warm_up_said_is_soon_left_alone(right: float) -> None:
    """27 rows of eight sequences take 23.5 ms, where rehearsals of even lengths took 9."""
    world = on_h200(8, table=lambda n, length: h200(n, 1) * (1 + 0.08 * (length - 1)), build=0.3e-3)
    world.head.right = right
    world.card.table = h200
    assert world.gain(500) > 0.95
    assert world.gain(500) > 0.965


def test_a_crowd_is_looked_at_less_and_less_and_then_left_alone() -> None:
    world = World(8, draft=20e-3, ngram=True)
    for one in world.sequences:
        one.tokens[:] = [5, 6] * 10
    choose = counted_choices(world)
    world.card.table = lambda *_: 1.0
    world.speculator.times.add(8, 1, 1e-6)
    for _ in range(20 * PAUSE_LAST):
        world.step()
    assert choose.call_count < 60
    crowd = World(17)
    assert sum(crowd.step() for _ in range(50)) == 0


def test_several_sequences_draft_together() -> None:
    world = World(4)
    world.gain(60)
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


@pytest.mark.parametrize(("match", "drafts"), [(COPIED - 1, False), (COPIED + 1, True)])
def test_a_text_that_is_copied_does_not_wait_for_matches_by_chance(match: int, drafts: bool) -> None:
    world = World(ngram=True)
    world.head.right = 0.0
    world.gain(100)
    worth, [one] = world.speculator._choice.worth, world.sequences
    assert worth is not None
    for _ in range(20):
        worth.add("ngram", 1, 1, 1.0)  # far longer than a step
    assert worth.left("ngram", 1) > 500
    copied = [*range(10**6, 10**6 + match)]
    one.tokens += [*copied, *range(10**6 + 500, 10**6 + 600), *copied]
    one.cached = len(one.tokens) - 1
    [draft] = world.speculator.propose(world.sequences, 2000)
    assert draft == ([*range(10**6 + 500, 10**6 + 500 + len(draft))])
    assert bool(draft) is drafts


def test_text_that_hardly_repeats_leaves_the_head_its_graph() -> None:
    """A few doubtful tokens from the text are not worth the two graphs that they cost."""
    world = on_h200(ngram=True)
    [one], rng = world.sequences, random.Random(0)
    world.gain(50)
    one.tokens += [1, 2, *(rng.randrange(ANYONE) for _ in range(20)), 1, 2]
    one.cached = len(one.tokens) - 1
    world.speculator.propose(world.sequences, 2000)
    assert world.speculator._orders[one].drafter == "mtp"
