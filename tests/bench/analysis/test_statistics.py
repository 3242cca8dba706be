"""Simulations: equal peers are not told apart, a true difference is found, and drift does not matter."""

import numpy as np
import pandas as pd
import pytest

from qwen_serve.bench.analysis.statistics import (
    DEFAULT_ROUNDS,
    LEAST_ROUNDS,
    Ratio,
    interval,
    percentiles,
    times_as_good,
    unpaired,
)
from tests.marks import slow_but

SCATTER = 0.03
"""Of one server's median from round to round, beyond what the round does to all: as measured on a card."""


def rows(values: dict[str, list[list[float]]], metric: str = "latency", cell: str = "short") -> pd.DataFrame:
    """Rows of the store from the values of each round, by subject."""
    return pd.DataFrame(
        [
            {"run": "r", "subject": subject, "workload": "w", "cell": cell, "round": number}
            | {"metric": metric, "value": value, "unit": "ms"}
            for subject, rounds in values.items()
            for number, measured in enumerate(rounds, 1)
            for value in measured
        ]
    )


def share_significant(times: float, rounds: int, *, trials: int = 400, skewed: bool = False) -> float:
    """The share of experiments in which a server that takes ``times`` as long as another is told apart from
    it."""
    rng = np.random.default_rng(7)
    count = 0
    for _ in range(trials):
        scatter = rng.gamma(1.0, SCATTER, (2, rounds)) if skewed else rng.normal(0.0, SCATTER, (2, rounds))
        count += interval(np.log(times) + scatter[0] - scatter[1]).significant
    return count / trials


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("rounds", slow_but([LEAST_ROUNDS], [LEAST_ROUNDS, DEFAULT_ROUNDS, 30]))
def test_two_that_do_the_same_come_out_alike_about_95_percent_of_the_time(rounds: int, skewed: bool) -> None:
    assert 0.015 <= share_significant(1.0, rounds, skewed=skewed) <= 0.085


def test_a_true_six_percent_is_found_at_the_default_number_of_rounds() -> None:
    assert share_significant(1.06, DEFAULT_ROUNDS) > 0.95
    assert share_significant(1 / 1.06, DEFAULT_ROUNDS) > 0.95


@pytest.mark.parametrize("rounds", range(2, LEAST_ROUNDS))
def test_too_few_rounds_have_no_interval(rounds: int) -> None:
    logs = np.random.default_rng(3).normal(0.0, SCATTER, rounds)
    assert interval(logs).low is None
    both = unpaired(np.exp(logs), np.exp(logs[::-1]), lower_is_better=False)
    assert both is not None
    assert both.low is None


def test_drift_that_hits_all_alike_does_not_matter() -> None:
    rng = np.random.default_rng(5)
    drift = np.linspace(1.0, 2.0, DEFAULT_ROUNDS)
    ours, theirs = (
        [[100.0 * times * slow * np.exp(rng.normal(0, 0.01)) for _ in range(5)] for slow in drift]
        for times in (1.0, 1.1)
    )
    ratio = times_as_good(rows({"ours": ours, "theirs": theirs}), "ours", "theirs", "latency")
    assert ratio is not None
    assert ratio.significant
    assert ratio.value == pytest.approx(1.1, rel=0.02)


def test_above_one_is_better_whichever_way_the_metric_counts() -> None:
    twice = {"ours": [[1.0]] * 8, "theirs": [[2.0]] * 8}
    assert times_as_good(rows(twice, "latency"), "ours", "theirs", "latency") == Ratio(2.0, 2.0, 2.0, 8)
    assert times_as_good(rows(twice, "output_rate"), "ours", "theirs", "output_rate") == Ratio(
        0.5, 0.5, 0.5, 8
    )


def test_cells_count_alike_and_the_mean_does_not_depend_on_the_reference() -> None:
    frame = pd.concat(
        [rows({"a": [[1.0]] * 5, "b": [[4.0]] * 5}), rows({"a": [[2.0]] * 5, "b": [[1.0]] * 5}, cell="long")]
    )
    there, back = times_as_good(frame, "a", "b", "latency"), times_as_good(frame, "b", "a", "latency")
    assert there is not None
    assert back is not None
    assert there.value == pytest.approx(2**0.5)
    assert there.value * back.value == pytest.approx(1.0)


def test_rounds_that_one_lacks_are_left_out() -> None:
    frame = rows({"a": [[1.0]] * 7, "b": [[1.0]] * 5})
    ratio = times_as_good(frame, "a", "b", "latency")
    assert ratio is not None
    assert ratio.rounds == 5
    assert times_as_good(frame, "a", "nobody", "latency") is None
    assert times_as_good(frame, "a", "b", "ttft") is None


def test_few_rounds_settle_nothing() -> None:
    ratio = interval(np.full(LEAST_ROUNDS - 1, 0.5))
    assert not ratio.significant
    assert "no interval" in str(ratio)


def test_a_small_difference_from_few_rounds_is_marked() -> None:
    logs = np.log(1.05) + np.tile([-0.001, 0.001], DEFAULT_ROUNDS // 2)
    assert interval(logs).verdict.endswith("]")
    assert interval(logs[:-1]).verdict.endswith("], fewer than 10 rounds")
    assert interval(logs[:-1] + np.log(1.2)).verdict.endswith("]")


def test_runs_of_different_times() -> None:
    rng = np.random.default_rng(11)
    apart = {1.0: 0, 1.06: 0}
    for times in apart:
        for _ in range(200):
            before, after = np.exp(rng.normal(0.0, SCATTER, (2, DEFAULT_ROUNDS)))
            ratio = unpaired(after * times, before, lower_is_better=True)
            assert ratio is not None
            apart[times] += ratio.significant
    assert apart[1.0] <= 20
    assert apart[1.06] >= 180
    assert unpaired([], [1.0], lower_is_better=True) is None
    slower = unpaired([2.0] * 5, [1.0] * 5, lower_is_better=True)
    assert slower is not None
    assert slower.value == pytest.approx(0.5)


def test_percentiles_by_any_columns() -> None:
    frame = rows({"a": [[float(n)] for n in range(101)], "b": [[5.0]]})
    found = percentiles(frame, "latency", "subject", "cell")
    assert (found["a", "short"].p10, found["a", "short"].p50, found["a", "short"].p99) == (10.0, 50.0, 99.0)
    assert found["b", "short"].count == 1
