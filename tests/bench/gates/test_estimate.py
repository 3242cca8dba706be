import random

import pytest

from qwen_serve.bench.gates.estimate import Estimate, Paired, estimate, wilson


def test_a_plain_proportion_gets_wilsons_interval() -> None:
    found = estimate([[[1.0]] * 8 + [[0.0]] * 2])
    assert found.score == pytest.approx(0.8)
    # Wilson's bounds for 8 of 10, as tabulated
    assert (found.low, found.high) == pytest.approx((0.4902, 0.9433), abs=1e-4)


@pytest.mark.parametrize(("outcome", "low", "high"), [(1.0, 0.7225, 1.0), (0.0, 0.0, 0.2775)])
def test_all_right_or_all_wrong_still_leaves_room(outcome: float, low: float, high: float) -> None:
    found = estimate([[[outcome]] * 10])
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)


def test_subtasks_count_the_same_whatever_their_size() -> None:
    found = estimate([[[1.0]] * 90 + [[0.0]] * 10, [[0.0], [1.0]]])
    assert found.score == pytest.approx((0.9 + 0.5) / 2)
    # the two items of the second subtask carry half of the weight, so the score is hardly known
    assert found.high - found.low > 0.5


def test_every_outcome_of_an_item_counts_but_they_come_together() -> None:
    apart = estimate([[[1.0]] * 60 + [[0.0]] * 40])
    together = estimate([[[1.0, 1.0]] * 30 + [[0.0, 0.0]] * 20])
    assert together.score == apart.score
    assert together.high - together.low > apart.high - apart.low
    assert (together.low, together.high) == pytest.approx(wilson(0.6, 50))


def draw(rng: random.Random) -> Estimate:
    """The estimate from random outcomes of three subtasks with different sizes and difficulties: two outcomes
    for each item, mostly equal."""
    strata = []
    for size, rate in ((60, 0.9), (25, 0.7), (40, 0.5)):
        items = []
        for _ in range(size):
            first = float(rng.random() < rate)
            items.append([first, first if rng.random() < 0.6 else float(rng.random() < rate)])
        strata.append(items)
    return estimate(strata)


def test_the_interval_holds_the_truth_in_95_of_100_draws() -> None:
    rng = random.Random(3)
    draws = [draw(rng) for _ in range(2_000)]
    truth = (0.9 + 0.7 + 0.5) / 3
    share = sum(found.low <= truth <= found.high for found in draws) / len(draws)
    assert 0.93 < share < 0.975


def test_answers_are_paired_with_the_references_item_by_item() -> None:
    pairs = [
        ([1.0], [1.0]),
        ([0.0], [1.0]),
        ([1.0, 0.0], [1.0, 1.0]),
        ([1.0], [0.0]),
        ([1.0, 0.0], [0.0, 1.0]),
    ]
    found = Paired.of(pairs)
    assert (found.lost, found.gained) == (2, 1)
    assert found + Paired(1, 1) == Paired(3, 2)


@pytest.mark.parametrize(
    ("lost", "gained", "p", "worse"),
    # two-sided sign tests, as tabulated
    [
        (0, 0, 1.0, False),
        (5, 5, 1.0, False),
        (8, 0, 2 / 256, True),
        (0, 8, 2 / 256, False),
        (9, 1, 22 / 1024, True),
    ],
)
def test_more_lost_than_chance_explains_is_worse(lost: int, gained: int, p: float, worse: bool) -> None:
    found = Paired(lost, gained)
    assert found.p_value == pytest.approx(p)
    assert found.worse == worse
