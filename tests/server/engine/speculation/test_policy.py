"""The policy in motion, on a made-up card: drafts as far as they pay, rests, and new chances."""

from __future__ import annotations

import random
from statistics import fmean
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_serve.server.engine.batch import Batch, Placement
from qwen_serve.server.engine.sampling import SampleResult
from qwen_serve.server.engine.sequence import SequenceStatus
from qwen_serve.server.engine.speculation.acceptance import DEPTHS, Acceptance
from qwen_serve.server.engine.speculation.always import Always
from qwen_serve.server.engine.speculation.cooldown import Cooldown
from qwen_serve.server.engine.speculation.policy import COOLDOWN_FIRST, Option, Policy, Step
from qwen_serve.server.engine.speculation.speculator import COLLECT, SPARSE
from qwen_serve.server.engine.speculation.times import StepTimes
from tests.marks import slow_but
from tests.server.engine.speculation.card import ANYONE, BUILD, Table, World, faster, h200, on_h200

# --- one sequence and a head -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "least"),
    [(1.0, 3.2), (0.9, 1.7), (0.8, 1.62), (0.7, 1.48), (0.6, 1.32), (0.5, 1.15), (0.3, 0.985), (0.0, 0.98)],
)
def test_what_it_gains_on_a_card_with_two_snapshots(right: float, least: float) -> None:
    """From the first step on; `card.py` prints the table."""
    gains = []
    for seed in range(4):
        world = on_h200(snapshots=2, seed=seed)
        world.head.right = right
        gains.append(world.gain(1000))
    assert fmean(gains) > least


def test_it_follows_a_text_that_changes_its_character() -> None:
    world, gains = on_h200(snapshots=2), []
    for right in (0.1, 0.9, 0.1):
        world.head.right = right
        gains.append(world.gain(5000))
    assert gains[0] > 0.97
    assert gains[1] > 1.75
    assert gains[2] > 0.97


@pytest.mark.parametrize("table", [h200, faster])
@pytest.mark.parametrize("bad", [0.0, 0.3, 0.5])
def test_a_load_for_which_drafts_do_not_pay_does_not_spoil_the_next(bad: float, table: Table) -> None:
    """Forty answers, then others with an acceptance of 1: the head is soon back, and cost little before."""
    world = on_h200(snapshots=2, table=table, capture=3e-3, draft=0.9e-3)
    world.head.right = bad
    assert fmean(world.answer(128) for _ in range(40)) > 0.96
    world.head.right = 1.0
    assert [gain > 1.5 for gain in (world.answer(128) for _ in range(8))][-3:] == [True] * 3


def test_a_long_chat_of_short_answers_that_no_draft_suits_loses_next_to_nothing() -> None:
    world = on_h200(snapshots=2, capture=3e-3)
    world.head.right = 0.0
    assert fmean(world.answer(32) for _ in range(200)) > 0.98


@pytest.mark.parametrize("seed", slow_but([0], range(2)))
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


@pytest.mark.parametrize("seed", slow_but([0], range(3)))
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
    assert sum(map(bool, world.lengths)) < 30
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


def test_steady_times_are_learnt_at_the_start_and_graphs_are_booked_apart() -> None:
    world = on_h200()
    times = world.policy.times
    for rows in (1, 2, 9):
        assert times.of(1, rows) == pytest.approx(h200(1, rows))
    assert times.building.value == pytest.approx(BUILD)
    world.head.right = 0.8
    world.gain(300)
    for rows in (1, 2, 5):
        assert times.of(1, rows) == pytest.approx(h200(1, rows), rel=0.02)
    assert times.building.value == pytest.approx(BUILD, rel=0.02)


@pytest.mark.parametrize(("right", "least"), [(1.0, 2.0), (0.9, 1.4), (0.8, 1.15), (0.3, 0.97), (0.0, 0.97)])
def test_it_gains_where_there_is_something_to_gain_and_loses_nothing_else(right: float, least: float) -> None:
    world = World()
    world.head.right = right
    world.gain(60)  # to learn
    assert world.gain(400) >= least


def test_a_head_that_was_bad_is_tried_again() -> None:
    world = on_h200()
    world.head.right = 0.0
    world.gain(100)
    drafts = [world.step() for _ in range(4 * COOLDOWN_FIRST)]
    assert 0 < sum(bool(n) for n in drafts) <= 12, "now and then"
    world.head.right = 1.0
    world.gain(600)
    assert world.gain(50) > 3


def test_a_head_that_costs_too_much_is_not_even_tried() -> None:
    world = on_h200(draft=20e-3)
    assert sum(world.step() for _ in range(1000)) == 0


def test_no_first_token_waits_for_a_head_that_has_to_read_the_prompt() -> None:
    world = on_h200()
    world.sequences[0].prompt_length += 1
    assert world.step() == 0
    assert world.step() > 0


def test_the_end_of_an_answer_is_held_against_nobody() -> None:
    """Where one more token is wanted no draft pays, whoever drafts."""
    world = World(
        snapshots=8, draft=0.5e-3, table=lambda n, rows: 1e-3 * (2 if rows == 1 else 3.9 + 0.1 * rows)
    )
    world.gain(200)
    for _ in range(40):
        [one] = world.sequences
        one.limit = len(one.tokens) + 2
        world.step()
    world.sequences[0].limit = 10**6
    assert world.gain(30) > 1.5


def test_a_card_that_is_slow_at_first_is_not_thought_slow_for_ever() -> None:
    """Clocks rise, another program starts beside it: every shape is measured again later."""
    calls = 0

    def rising(n: int, length: int) -> float:
        nonlocal calls
        calls += 1
        return h200(n, length) * (4 if calls < 50 else 1)

    times = World(table=rising, build=2e-3, snapshots=8).policy.times
    for length in (1, 2, 3, 5, 9):
        assert times.of(1, length) == pytest.approx(h200(1, length), rel=0.02)
    assert times.of(8, 1) == pytest.approx(h200(8, 1), rel=0.02)
    assert times.building.value == pytest.approx(2e-3, rel=0.05)


@pytest.mark.parametrize("held_up", [1.0, 2.0, 3.0])
def test_a_start_beside_others_does_not_keep_it_from_drafting(held_up: float) -> None:
    """Where no draft pays at first, nothing but plain steps tells what verifications take."""
    world = on_h200(snapshots=0, capture=3e-3, draft=0.9e-3, held_up=held_up)
    world.head.right = 0.0
    for _ in range(20):
        world.answer(128)
    times = world.policy.times
    for rows in (1, 2, 5, 9):
        assert times.of(1, rows) == pytest.approx(h200(1, rows), rel=0.03)
    assert times.of(8, 2) == pytest.approx(h200(8, 2), rel=0.03)
    world.head.right = 1.0
    assert max(world.answer(128) for _ in range(8)) > 2


@pytest.mark.parametrize("held_up", [1.0, 1.5, 3.0])
def test_a_start_beside_others_does_not_keep_it_at_a_depth_that_paid_by_its_measure(held_up: float) -> None:
    world = on_h200(snapshots=2, capture=3e-3, draft=0.9e-3, held_up=held_up)
    world.head.right = 0.9
    world.gain(200)
    assert world.gain(2000) > 1.6


@pytest.mark.parametrize("right", [0.9, 0.8, 0.7, 0.6])
def test_a_graph_that_is_captured_is_worth_staying_with(right: float) -> None:
    """The second step of a shape costs more than the first: with CUDA, where it is captured."""
    world = on_h200(snapshots=2, build=2.3e-3, capture=5e-3)
    assert world.policy.times.capturing.value == pytest.approx(5e-3)
    assert world.policy.times.of(1, 3) == pytest.approx(h200(1, 3))
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
    gains = []
    for _ in range(8):
        world.speculator.forget(world.sequences[0])
        world.sequences = [world.newcomer(0)]
        world.card.keep_hidden(world.card.keeps_hidden)  # what comes next builds a graph
        world.head.reads = 15e-3
        gains.append(world.gain(250))
    assert fmean(gains) > least
    assert min(gains) > 0.9


def test_a_draft_that_does_not_keep_what_it_promises_is_given_up() -> None:
    world = World()
    world.head.right = 0.8
    planned = world.card.table
    world.card.table = lambda n, length: planned(n, length) * (3 if length > 1 else 1)
    world.gain(50)
    assert world.gain(3000) > 0.93


# --- several -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 8, 17])
def test_nothing_is_kept_in_a_crowd_that_the_head_does_not_draft_for(n: int) -> None:
    world = on_h200(n)
    world.gain(2)
    assert not world.card.keeps_hidden
    assert world.head.rounds == 0
    assert world.speculator.stats()["mtp"].state == "resting"
    one, *others = world.sequences
    for other in others:
        world.speculator.forget(other)
    world.sequences = [one]
    world.step()
    assert world.card.keeps_hidden


def repeating(world: World, right: float) -> None:
    """Every text repeats itself, and goes on so with a chance of `right` for each token."""
    world.head.right = right
    for one in world.sequences:
        one.tokens[:] = [one.slot or 0, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15] * 8
        one.computed = len(one.tokens) - 1


@pytest.mark.parametrize("right", [0.7, 0.3])
@pytest.mark.parametrize("n", [2, 8, 16, 64])
def test_a_crowd_that_it_would_slow_down_is_left_alone(n: int, right: float) -> None:
    world = on_h200(n, ngram=True)
    repeating(world, right)
    assert world.gain(500) > 0.93, "a first draft may be long"
    assert world.gain(1000) > 0.98


@pytest.mark.parametrize("right", [0.7, 0.3])
def test_a_crowd_that_is_slower_than_the_warm_up_said_is_soon_left_alone(right: float) -> None:
    """27 rows of eight sequences take 23.5 ms, where rehearsals of even lengths took 9."""
    world = on_h200(8, table=lambda n, length: h200(n, 1) * (1 + 0.08 * (length - 1)), build=0.3e-3)
    world.head.right, world.head.most = right, 8
    world.card.table = h200
    assert world.gain(500) > 0.95
    assert world.gain(500) > 0.965


def test_a_crowd_that_copies_gains() -> None:
    world = World(4, ngram=True)
    repeating(world, 1.0)
    for one in world.sequences:
        one.tokens[:] = one.tokens * 3
        one.computed = len(one.tokens) - 1
    batch = world.propose()
    assert world.drafted_by == "ngram"
    assert len({chunk.n_tokens for chunk in batch.chunks}) == 1, "one number of rows, one pass"


def test_who_has_no_draft_costs_the_others_a_pass() -> None:
    times = StepTimes()
    for rows in (1, 2, 4, 8, 16, 64, 256):
        times.add(1, rows, 1e-3 * (4 + 0.1 * rows))
    assert times.passes([64, 1]) == pytest.approx(1e-3 * (4 + 0.2) + 1e-3 * (4 + 6.3))
    drafter = stand_in()
    option = Option(drafter, ["sure", *[""] * 7], [3] + [0] * 7)
    assert Policy(times).choose([option], Step([1] * 8, 999, 999)) is None
    alone = Policy(times).choose([Option(drafter, ["sure"], [3])], Step([1], 999, 999))
    assert alone is not None
    assert alone.lengths == [3]


def test_a_drafter_for_several_drafts_for_all_of_them_in_one_pass() -> None:
    """As one that drafts a block for each of them at once would."""
    world = World(4)
    world.head.most = 4
    world.gain(60)
    batch = world.propose()
    assert world.drafted_by == "mtp"
    assert len({chunk.n_tokens for chunk in batch.chunks}) == 1
    assert world.gain(200) > 1.5


# --- texts -------------------------------------------------------------------------------------------------


def test_text_that_repeats_is_drafted_without_the_head() -> None:
    world = World(ngram=True)
    [one] = world.sequences
    one.tokens[:] = [7, 8, 9, 10] * 30
    one.computed = len(one.tokens) - 1
    [chunk] = world.propose().chunks
    assert [*chunk.draft] == ([7, 8, 9, 10] * 30)[: len(chunk.draft)]
    assert len(chunk.draft) > 10
    assert world.head.rounds == 0


def test_text_that_hardly_repeats_leaves_the_head_its_graph() -> None:
    """A few doubtful tokens from the text are not worth the two graphs that they cost."""
    world = on_h200(ngram=True)
    [one], rng = world.sequences, random.Random(0)
    world.gain(50)
    one.tokens += [1, 2, 3, *(rng.randrange(ANYONE) for _ in range(20)), 1, 2, 3]
    one.computed = len(one.tokens) - 1
    world.propose()
    assert world.drafted_by == "mtp"


@pytest.mark.parametrize("right", [0.6, 0.3, 0.0])
def test_a_processor_on_which_rows_cost_what_steps_do_loses_next_to_nothing(right: float) -> None:
    """Two cores: a row more takes 0.64 of a step."""
    world = World(table=lambda n, rows: 1.5e-3 * (0.36 + 0.64 * n * rows), draft=1.5e-3, ngram=True)
    repeating(world, right)
    [one], rng = world.sequences, random.Random(1)
    for _ in range(1500):
        if rng.random() < 0.3:  # it goes on with something that was there before
            start = rng.randrange(len(one.tokens) - 8)
            one.tokens += one.tokens[start : start + rng.choice([3, 4, 7])]
            one.computed = len(one.tokens) - 1
        world.step()
    plain = world.card.table(1, 1)
    assert world.tokens / world.card.now * plain > 0.985


# --- what it is made of ------------------------------------------------------------------------------------


def stand_in(chance: float = 0.999, *, seconds: float = 0.0, depth: int = 127, instant: bool = True) -> Any:
    """A drafter that is only talked about."""
    drafter = Mock(instant=instant, most=16, depth=depth, kinds={"sure": chance})
    drafter.cost = lambda n, length: length * seconds
    return drafter


def card_times(weights: float = 4.0, row: float = 0.1) -> StepTimes:
    """Milliseconds for the weights and for a row."""
    times = StepTimes()
    for rows in (1, 2, 4, 8, 16, 64, 256):
        times.add(1, rows, 1e-3 * (weights + row * rows))
    return times


@pytest.mark.parametrize(
    ("chance", "least", "most"), [(0.01, 0, 0), (0.5, 1, 8), (0.9, 8, 40), (1.0, 127, 127)]
)
def test_doubtful_drafts_are_short_and_hopeless_ones_are_none(chance: float, least: int, most: int) -> None:
    plan = Policy(card_times()).choose([Option(stand_in(chance), ["sure"], [127])], Step([1], 512, 512))
    assert least <= (plan.lengths[0] if plan else 0) <= most


def test_where_a_row_costs_as_much_as_a_step_nothing_is_drafted() -> None:
    times = card_times(weights=0.1, row=4)
    assert Policy(times).choose([Option(stand_in(0.9), ["sure"], [64])], Step([1], 512, 512)) is None


def test_the_instant_drafter_is_preferred_where_it_is_as_good() -> None:
    options = [
        Option(stand_in(0.9, seconds=0.5e-3, instant=False), ["sure"], [8]),
        Option(text := stand_in(0.9), ["sure"], [64]),
    ]
    plan = Policy(card_times()).choose(options, Step([1], 512, 512))
    assert plan is not None
    assert plan.drafter is text


def test_redoing_what_was_right_is_part_of_the_price() -> None:
    lengths = []
    for rewinds in (0, 64):
        step = Step([1], 512, 512, rewinds=rewinds)
        plan = Policy(card_times(row=0.4)).choose([Option(stand_in(0.8), ["sure"], [64])], step)
        lengths.append(plan.lengths[0] if plan else 0)
    assert lengths[0] < lengths[1]


@settings(max_examples=60, deadline=None)
@given(
    mix=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 255)), min_size=1, max_size=10),
    chance=st.floats(0.01, 1),
    room=st.integers(0, 400),
    most=st.integers(1, 400),
)
def test_plans_keep_to_what_there_is(mix: list[tuple[int, int]], chance: float, room: int, most: int) -> None:
    pending, limits = [own for own, _ in mix], [limit for _, limit in mix]
    option = Option(stand_in(chance), ["sure" if limit else "" for limit in limits], limits)
    for policy in (Policy(card_times()), Always(card_times())):
        plan = policy.choose([option], Step(pending, room, most))
        if plan is not None:
            assert 0 < sum(plan.lengths) <= min(room, most - sum(pending))
            assert all(length <= limit for length, limit in zip(plan.lengths, limits, strict=True))


def test_always_drafts_as_far_as_it_can() -> None:
    text, head = stand_in(0.01), stand_in(0.01, seconds=9.0, instant=False)
    options = [Option(text, ["", "sure"], [0, 60]), Option(head, ["sure"] * 2, [8, 8])]
    plan = Always(StepTimes()).choose(options, Step([1, 3], 100, 100))
    assert plan is not None
    assert (plan.drafter, plan.lengths) == (text, [0, 48])
    plan = Always(StepTimes()).choose(options[1:], Step([1, 3], 100, 100))
    assert plan is not None
    assert (plan.drafter, plan.lengths) == (head, [8, 8])


@pytest.mark.parametrize("truth", [[0.9] * 4, [0.95, 0.6, 0.2, 0.2]])
def test_hit_rates_are_learnt_by_depth(truth: list[float]) -> None:
    rates, rng = Acceptance(0.7), random.Random(3)
    for _ in range(600):
        accepted = 0
        while accepted < 4 and rng.random() < truth[accepted]:
            accepted += 1
        rates.add(4, accepted)
    expected = np.cumsum(np.cumprod(truth))
    assert [rates.expected(n) for n in (1, 2, 3, 4)] == pytest.approx(expected, abs=0.3)
    assert rates.expected(0) == 0
    assert rates.all_right(4) == pytest.approx(np.prod(truth), abs=0.2)


def test_depths_never_tried_are_taken_for_the_one_before() -> None:
    rates = Acceptance(0.5)
    for _ in range(60):
        rates.add(1, 1)
    assert rates.expected(3) == pytest.approx(3, abs=0.3)
    assert DEPTHS < rates.expected(4 * DEPTHS) < 4 * DEPTHS


def test_a_step_behind_a_prompt_that_nobody_waited_for_teaches_nothing() -> None:
    """The time to a first token is that of the prompt before it, too: no sign of what a token takes."""
    world = on_h200()
    known = world.speculator.step_times()
    one = world.newcomer(0)
    one.prompt_length, one.computed, one.status = len(one.tokens), 0, SequenceStatus.PREFILL
    for count, sampled, seconds in ((one.pending - 1, [], 0.001), (1, [1], 0.08)):
        batch = Batch(draft_room=2000)
        batch.add(one, count)
        batch.placements = [Placement(list(range(count)))]
        world.speculator.propose(batch)
        [one.computed] = world.speculator.verify(batch, [SampleResult(sampled)], seconds)
    assert world.speculator.step_times() == known
    one.tokens.append(1)
    one.status, world.sequences = SequenceStatus.DECODE, [one]
    world.gain(20)
    assert world.speculator.step_times() != known


def test_each_loss_lengthens_the_cooldown_and_a_gain_ends_it() -> None:
    cooldown, lengths = Cooldown(2, 50), list[int]()
    assert cooldown.left(0) == 0
    for now in range(0, 400, 100):
        cooldown.begin(now)
        assert cooldown.lost
        lengths.append(cooldown.left(now))
        assert cooldown.left(now + 60) == 0
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (2, 50)
    cooldown.end()
    assert not cooldown.lost
    cooldown.begin(7)
    assert cooldown.left(7) == 2


def test_a_request_that_begins_ends_a_cooldown_of_which_a_part_is_over() -> None:
    cooldown = Cooldown(40, 100)
    cooldown.begin(100)
    cooldown.retry_early(100)
    assert cooldown.left(110) == 30
    cooldown.retry_early(130)
    assert cooldown.left(130) == 0
    cooldown.begin(200, most=60)
    assert cooldown.left(200) == 60, "that is enough"
    cooldown.begin(300, least=100)
    assert cooldown.left(300) == 100


def test_no_hidden_rows_are_collected_during_a_long_cooldown() -> None:
    world = on_h200()
    world.head.right = 0.0
    world.gain(1000)
    kept, drafted = [], []
    for _ in range(4000):
        kept.append(world.card.keeps_hidden)
        drafted.append(bool(world.step()))
    assert sum(kept) < 0.25 * len(kept)
    first = drafted.index(True)
    assert all(kept[first - COLLECT + 1 : first + 1]), "it has read some text when it is tried again"
    world.head.right = 1.0
    world.gain(4000)
    assert world.gain(100) > 3
    assert world.card.keeps_hidden


def test_acceptance_follows_a_text_that_changes_and_early_errors_far_down_fade() -> None:
    rates = Acceptance(0.97)
    rates.add(2, 1)
    early = rates.expected(2) - rates.expected(1)
    for _ in range(1000):
        rates.add(1, 1)
    assert rates.expected(2) - rates.expected(1) > early + 0.1
    for _ in range(60):
        rates.add(1, 0)
    assert rates.expected(1) < 0.5
    rates.retry()
    for _ in range(4):
        rates.add(1, 1)
    assert rates.expected(1) > 0.6


def test_a_retry_goes_on_as_long_as_nothing_was_wrong() -> None:
    """What is remembered of before weighs more than one draft that was right."""
    policy, head = Policy(card_times(row=1.5)), stand_in(0.3, depth=8)
    for _ in range(100):
        policy.verified(head, "sure", 1, 1, 0)
    option, step = Option(head, ["sure"], [8]), Step([1], 512, 512)
    assert policy.choose([option], step) is None
    policy.now += COOLDOWN_FIRST
    for _ in range(3):
        plan = policy.choose([option], step)
        assert plan is not None
        policy.verified(head, "sure", 1, plan.lengths[0], plan.lengths[0])
    policy.verified(head, "sure", 1, 2, 0)
    assert policy.choose([option], step) is None


def test_a_head_that_cools_down_is_not_planned_for() -> None:
    world = on_h200()
    world.head.right = 0.0
    choose = Mock(wraps=world.policy.choose)
    world.policy.choose = choose  # type: ignore[method-assign]
    world.gain(2000)
    assert choose.call_count < 60


def test_a_drafter_that_was_unlucky_at_first_drafts_again_while_another_drafts() -> None:
    world = on_h200(snapshots=15)
    block = Mock(instant=False, depth=15, kinds={"dflash": 0.85})
    block.name, block.cost.return_value = "dflash", 1.7e-3
    options = [Option(block, ["dflash"], [15]), Option(world.head, ["mtp"], [8])]
    step = Step([1], 200, 200, rewinds=15, keeps_graph=15)
    for _ in range(2):
        world.policy.verified(block, "dflash", 1, 15, 0)
        world.policy.verified(world.head, "mtp", 1, 4, 3)
    plans = [world.policy.choose(options, step) for _ in range(100)]
    drafters = [plan.drafter for plan in plans if plan is not None]
    assert drafters[0] is world.head
    assert block in drafters[10:]


def test_prompts_of_a_crowd_for_which_drafts_could_not_pay_are_not_read_along() -> None:
    world = on_h200(8, draft=4e-3)
    world.head.most, kept = 8, []
    for number in range(24):
        world.gain(40)
        world.admit(number % 8)
        kept.append(world.card.keeps_hidden)
    assert world.head.rounds == 0
    assert sum(kept) <= 1, "not after the first verdict"


def test_a_drafter_that_lost_reads_the_end_of_a_prompt_only(monkeypatch: pytest.MonkeyPatch) -> None:
    world, read = on_h200(), list[int]()
    collect = world.head.collect

    def counted(slot: int, start: int, rows: Any) -> None:
        read.append(len(rows))
        collect(slot, start, rows)

    monkeypatch.setattr(world.head, "collect", counted)

    def rows_read() -> int:
        """Of a prompt of 300 tokens."""
        read.clear()
        one = world.newcomer(0)
        one.tokens[:] = range(300)
        with monkeypatch.context() as patch:
            patch.setattr(world, "newcomer", lambda _: one)
            world.admit(0)
        world.speculator.catch_up()
        return sum(read)

    assert rows_read() == 300
    world.head.right = 0.0
    world.gain(1500)  # it lost
    assert rows_read() <= COLLECT
    world.head.right = 1.0
    world.gain(1500)
    assert rows_read() == 300


@pytest.mark.parametrize(("match", "drafts"), [(15, False), (17, True)])
def test_a_text_that_is_copied_does_not_wait_for_matches_by_chance(match: int, drafts: bool) -> None:
    world = World(ngram=True)
    world.head.right = 0.0
    world.gain(100)
    for kind in ("match-3", "match-6"):
        for _ in range(60):
            world.policy.add(world.ngram, kind, 1, 1, 1.0)  # far longer than a step
        assert world.policy.record(world.ngram, kind, 1).cooldown.left(world.policy.now) > 500
    [one] = world.sequences
    copied = [*range(10**6, 10**6 + match)]
    one.tokens += [*copied, *range(10**6 + 500, 10**6 + 600), *copied]
    one.computed = len(one.tokens) - 1
    draft = max((world.propose().chunks[0].draft for _ in range(SPARSE)), key=len)
    assert [*draft] == ([*range(10**6 + 500, 10**6 + 500 + len(draft))])
    assert bool(draft) is drafts


def test_a_text_that_no_kind_may_draft_from_is_not_even_looked_at() -> None:
    world = World(ngram=True)
    repeating(world, 0.0)
    world.gain(30)
    world.ngram.propose = Mock(wraps=world.ngram.propose)  # type: ignore[method-assign]
    for kind in world.ngram.kinds:
        while not world.policy.record(world.ngram, kind, 1).cooldown.left(world.policy.now):
            world.policy.add(world.ngram, kind, 1, 1, 1.0)
    world.propose()
    assert not world.ngram.propose.called


def test_what_loses_by_its_results_is_given_up_for_longer_each_time() -> None:
    policy, head = Policy(card_times()), stand_in()
    plain, cooldowns = policy.times.of(1, 1), list[int]()
    for _ in range(4):
        steps = 0
        while not policy.cooldown(head, 1):
            policy.add(head, "sure", 1, 1, 3 * plain)
            steps += 1
        assert steps < 20
        assert not policy.cooldown(head, 8), "crowds are judged apart"
        cooldowns.append(policy.cooldown(head, 1))
        policy.now += cooldowns[-1]
    assert cooldowns == sorted(cooldowns)
    assert cooldowns[-1] > 4 * cooldowns[0]


def test_what_pays_goes_on() -> None:
    policy, head = Policy(card_times()), stand_in()
    for _ in range(200):
        policy.add(head, "sure", 1, 2, 1.9 * policy.times.of(1, 1))
        assert not policy.cooldown(head, 1)
