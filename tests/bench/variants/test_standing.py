"""Which variant is recommended, and what is said when none can be."""

import pytest

from bench.latency_result import Baseline
from bench.variants.standing import advise, items_to_decide, margin, pareto_front, rank, verdict_of
from tests.bench.variants.made import broken, gate, result, swept

PASS = gate("reading", 0.95, 0.90, 0.97, 0.80)
CLOSE = gate("sums", 0.85, 0.75, 0.92, 0.80)
FAIL = gate("sums", 0.60, 0.50, 0.70, 0.80)


def test_front_keeps_what_nothing_beats_in_both() -> None:
    points = [("a", 1.0, 9.0), ("b", 2.0, 7.0), ("c", 1.5, 6.0), ("d", 3.0, 7.0), ("e", 3.0, 1.0)]
    assert pareto_front(points) == {"a", "d"}
    assert pareto_front([("a", 1.0, 1.0), ("b", 1.0, 1.0)]) == {"a", "b"}, "equals do not dominate"
    assert pareto_front([]) == set()


def test_speed_is_the_mean_ratio_over_categories_and_protocols() -> None:
    slow, fast = result("slow", 2.0, PASS), result("fast", 0.5, PASS)
    baseline = Baseline(
        name="given", seconds={"official": {"short": 1.0, "long": 4.0}, "distinct": {"short": 1.0}}
    )
    standings = rank([slow, fast], baseline)
    # slow: 1/2, 4/4 and 1/2; the distinct long ones have nothing to be compared with
    assert [s.speed for s in standings] == pytest.approx([2 / 3, 8 / 3])
    assert [s.front for s in standings] == [False, True]


def test_margin_is_that_of_the_tightest_gate() -> None:
    assert margin([PASS, CLOSE]) == (pytest.approx(5.0), "sums")
    free = gate("free", 0.5, 0.4, 0.6, None)
    assert margin([free, gate("other", 0.7, 0.6, 0.8, None)]) == (pytest.approx(60.0), None)
    assert margin([]) == (None, None)


def test_one_gate_decides_for_all() -> None:
    assert verdict_of([PASS, CLOSE]) == "undecided"
    assert verdict_of([PASS, CLOSE, FAIL]) == "fail"
    assert verdict_of([PASS, gate("free", 0.5, 0.4, 0.6, None)]) == "pass"
    assert verdict_of([gate("free", 0.5, 0.4, 0.6, None)]) is None


def test_the_fastest_that_passes_is_shipped() -> None:
    sweep = swept(result("big", 2.0, PASS), result("small", 1.0, PASS), result("tiny", 0.5, PASS, FAIL))
    assert sweep.recommended == "small"
    shipped, failed = sweep.advice
    assert "Ship small: the fastest of the 2 that pass every gate, speed 2.00" in shipped
    assert "+15.0 points at the tightest gate, reading: 95.0%" in shipped and "against 80.0%" in shipped
    assert failed == "tiny fails sums (60.0% against 80.0%)."


def test_a_faster_undecided_one_is_named_with_what_would_decide() -> None:
    sweep = swept(result("big", 2.0, PASS), result("open", 1.0, PASS, CLOSE), result("slow", 3.0, CLOSE))
    assert sweep.recommended == "big"
    assert len(sweep.advice) == 2, "a slower undecided one could not change the choice"
    assert sweep.advice[1].startswith("open is faster (2.00) but undecided at this sample size: sums (85.0%")
    assert "items would decide" in sweep.advice[1]


def test_nothing_that_is_undecided_is_shipped() -> None:
    sweep = swept(result("a", 2.0, CLOSE), result("b", 1.0, FAIL))
    assert sweep.recommended is None
    assert sweep.advice[0].startswith("No variant is known to pass every gate: at this sample size")
    assert [line.split()[0] for line in sweep.advice[1:]] == ["a", "b"]


def test_none_passing_is_said_with_the_nearest() -> None:
    worse = gate("sums", 0.3, 0.2, 0.4, 0.8)
    sweep = swept(result("a", 1.0, FAIL), result("b", 2.0, worse))
    assert sweep.recommended is None
    assert sweep.advice[0] == "No variant passes every gate. a comes nearest: it lacks 20.0 points at sums."


def test_speeds_that_the_runs_do_not_tell_apart() -> None:
    close = swept(result("a", 1.00, PASS, spread=0.1), result("b", 1.05, PASS, spread=0.1))
    assert close.recommended == "a"
    assert close.advice[1].startswith("b passes too, and these runs do not tell its speed from a's (0.95;")
    apart = swept(result("a", 1.00, PASS, spread=0.01), result("b", 1.05, PASS, spread=0.01))
    assert len(apart.advice) == 1


def test_without_thresholds_none_is_shipped() -> None:
    free = gate("free", 0.5, 0.4, 0.6, None)
    sweep = swept(result("a", 2.0, free), result("b", 1.0, free))
    assert sweep.recommended is None
    assert sweep.advice == ["No gate with a threshold was asked: none is recommended. The fastest is b."]


def test_failures_are_listed_and_rank_nowhere() -> None:
    sweep = swept(result("a", 1.0, PASS), broken("b", "no room:\nlog"))
    assert sweep.advice[-1] == "b could not be measured: no room"
    assert not sweep.standings[1].front and sweep.standings[1].speed is None
    only = [broken("b", "no room")]
    assert advise(only, rank(only, None)) == (
        None,
        ["No variant could be measured: there is nothing to recommend.", "b could not be measured: no room"],
    )


def test_items_to_decide() -> None:
    sure = items_to_decide(gate("g", 1.0, 0.72, 1.0, 0.9, items=10))
    assert sure is not None and 30 < sure < 40, "Wilson's lower bound of n of n passes 90% at n = 35"
    assert items_to_decide(gate("g", 0.80, 0.70, 0.88, 0.801, items=60)) is None, "only all of them can"
