"""What the policy gains beside the best fixed depth, and loses beside no drafts, on made-up cards.

No figure of a card is expected here: each gain is compared with that of the same card otherwise.
"""

import random
from statistics import fmean
from typing import Any
from unittest.mock import Mock

import pytest

from qwen_serve.server.engine.speculation.policy import COOLDOWN_FIRST
from tests.server.engine.speculation.card import ANYONE, BUILD, World, faster, h200, on_h200

KEEPS = 0.93
"""Of the speed without drafts, whatever is tried."""

NEAR = 0.85
"""Of the speed of the best fixed depth, once it is known."""

# --- one sequence and a head -------------------------------------------------------------------------------


CARDS: dict[str, dict[str, Any]] = {
    "snapshots": {"table": h200, "build": BUILD, "snapshots": 8, "deepest": 16},
    "two snapshots, a faster card": {"table": faster, "build": BUILD, "snapshots": 2, "deepest": 16},
    "graphs are captured": {"table": h200, "build": 2.3e-3, "capture": 5e-3, "snapshots": 2, "deepest": 16},
    "copies alone": {"table": h200, "build": BUILD, "deepest": 16},
    "no graphs": {},
}


@pytest.mark.parametrize("right", [1.0, 0.8, 0.5, 0.0])
@pytest.mark.parametrize("card", CARDS)
def test_it_comes_near_the_best_depth_and_loses_little_until_then(card: str, right: float) -> None:
    world = World(**CARDS[card])
    world.head.right = right
    assert world.gain(400) > KEEPS
    gain = world.gain(600)
    assert gain > KEEPS
    assert gain > NEAR * world.best(right, range(CARDS[card].get("snapshots", 0) + 1))[0]
    if right == 1.0:
        assert len(set(world.lengths[-300:])) == 1, "one depth, one graph"


def test_it_follows_a_text_that_changes_its_character() -> None:
    world, gains = on_h200(snapshots=2), []
    for right in (0.1, 0.9, 0.1):
        world.head.right = right
        gains.append(world.gain(2500))
    assert gains[1] > NEAR * world.best(0.9, range(3))[0]
    assert min(gains) > KEEPS


def test_a_load_for_which_drafts_do_not_pay_does_not_spoil_the_next() -> None:
    """Forty answers, then others with an acceptance of 1: soon they gain what they would have gained."""
    last = []
    for before in (40, 0):
        world = on_h200(snapshots=2, capture=3e-3, draft=0.9e-3)
        world.head.right = 0.3
        assert all(world.answer(128) > KEEPS for _ in range(before))
        world.head.right = 1.0
        last.append(fmean([world.answer(128) for _ in range(8)][-3:]))
    assert last[0] > 0.95 * last[1]


def test_a_long_chat_of_short_answers_that_no_draft_suits_loses_next_to_nothing() -> None:
    world = on_h200(snapshots=2, capture=3e-3)
    world.head.right = 0.0
    assert fmean(world.answer(32) for _ in range(100)) > KEEPS


def test_a_draft_in_a_hundred_that_must_build_its_graph_is_not_worth_it() -> None:
    """With neither snapshots nor copies a draft builds two: only a head that is nearly always right may."""
    world = on_h200(snapshots=0, copies=False)
    world.head.right = 0.6
    world.gain(1000)
    assert sum(map(bool, world.lengths)) < 30
    world = on_h200(snapshots=0, copies=False)
    world.gain(100)
    assert world.gain(200) > 1


def test_a_copy_of_the_state_is_worth_more_than_a_graph() -> None:
    gains = []
    for copies in (False, True):
        world = on_h200(snapshots=2, copies=copies)
        world.gain(100)
        gains.append(world.gain(500))
    assert gains[1] > gains[0]


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


def test_a_head_that_was_bad_is_tried_again() -> None:
    world = on_h200()
    world.head.right = 0.0
    world.gain(100)
    drafts = [world.step() for _ in range(4 * COOLDOWN_FIRST)]
    assert 0 < sum(bool(n) for n in drafts) <= 12, "now and then"
    world.head.right = 1.0
    world.gain(600)
    assert world.gain(50) > NEAR * world.best(1.0, range(9))[0]


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
    assert world.gain(30) > 1


def test_a_card_that_is_slow_at_first_is_not_thought_slow_for_ever() -> None:
    """Clocks rise, another program starts beside it: every shape is measured again later."""
    calls = 0

    def rising(n: int, length: float) -> float:
        nonlocal calls
        calls += 1
        return h200(n, length) * (4 if calls < 50 else 1)

    times = World(table=rising, build=2e-3, snapshots=8).policy.times
    for length in (1, 2, 3, 5, 9):
        assert times.of(1, length) == pytest.approx(h200(1, length), rel=0.02)
    assert times.of(8, 1) == pytest.approx(h200(8, 1), rel=0.02)
    assert times.building.value == pytest.approx(2e-3, rel=0.05)


def test_a_start_beside_others_is_made_good() -> None:
    """Where no draft pays at first, nothing but plain steps tells what verifications take."""
    gains = []
    for held_up in (1.0, 3.0):
        world = on_h200(snapshots=0, capture=3e-3, draft=0.9e-3, held_up=held_up)
        world.head.right = 0.0
        for _ in range(20):
            world.answer(128)
        for shape in ((1, 1), (1, 5), (1, 9), (8, 2)):
            assert world.policy.times.of(*shape) == pytest.approx(h200(*shape), rel=0.03)
        world.head.right = 1.0
        gains.append(max(world.answer(128) for _ in range(8)))
    assert gains[1] > 0.95 * gains[0]


@pytest.mark.parametrize("right", [0.9, 0.0])
def test_what_a_request_takes_once_does_not_condemn_the_head(right: float) -> None:
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
    assert fmean(gains) > (1 if right else KEEPS)


def test_a_draft_that_does_not_keep_what_it_promises_is_given_up() -> None:
    world = World()
    world.head.right = 0.8
    planned = world.card.table
    world.card.table = lambda n, length: planned(n, length) * (3 if length > 1 else 1)
    world.gain(50)
    assert world.gain(1000) > KEEPS


# --- several -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 17])
def test_nothing_is_kept_in_a_crowd_that_the_head_does_not_draft_for(n: int) -> None:
    world = on_h200(n)
    world.gain(2)
    assert not world.card.keeps_hidden
    assert world.head.rounds == 0
    assert world.speculator.stats()["mtp"].state == "cooldown"
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


@pytest.mark.parametrize(("n", "right"), [(2, 0.3), (8, 0.7), (64, 0.3)])
def test_a_crowd_that_it_would_slow_down_is_left_alone(n: int, right: float) -> None:
    world = on_h200(n, ngram=True)
    repeating(world, right)
    assert world.gain(500) > KEEPS, "a first draft may be long"
    assert world.gain(300) > 0.98


def test_a_crowd_that_is_slower_than_the_warm_up_said_is_soon_left_alone() -> None:
    """27 rows of eight sequences take 23.5 ms, where rehearsals of even lengths took 9."""
    world = on_h200(8, table=lambda n, length: h200(n, 1) * (1 + 0.08 * (length - 1)), build=0.3e-3)
    world.head.right, world.head.most = 0.5, 8
    world.card.table = h200
    assert world.gain(1000) > KEEPS


def test_a_crowd_that_copies_gains() -> None:
    world = World(4, ngram=True)
    repeating(world, 1.0)
    for one in world.sequences:
        one.tokens[:] = one.tokens * 3
        one.computed = len(one.tokens) - 1
    batch = world.propose()
    assert world.drafted_by == "ngram"
    assert len({chunk.n_tokens for chunk in batch.chunks}) == 1, "one number of rows, one pass"


def test_a_drafter_for_several_drafts_for_all_of_them_in_one_pass() -> None:
    """As one that drafts a block for each of them at once would."""
    world = World(4)
    world.head.most = 4
    world.gain(60)
    batch = world.propose()
    assert world.drafted_by == "mtp"
    assert len({chunk.n_tokens for chunk in batch.chunks}) == 1
    assert world.gain(200) > 1


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


def test_a_processor_on_which_rows_cost_what_steps_do_loses_next_to_nothing() -> None:
    """Two cores: a row more takes 0.64 of a step."""
    world = World(table=lambda n, rows: 1.5e-3 * (0.36 + 0.64 * n * rows), draft=1.5e-3, ngram=True)
    repeating(world, 0.3)
    [one], rng = world.sequences, random.Random(1)
    for _ in range(1500):
        if rng.random() < 0.3:  # it goes on with something that was there before
            start = rng.randrange(len(one.tokens) - 8)
            one.tokens += one.tokens[start : start + rng.choice([3, 4, 7])]
            one.computed = len(one.tokens) - 1
        world.step()
    plain = world.card.table(1, 1)
    assert world.tokens / world.card.now * plain > KEEPS


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
