"""The recommended variant, the advice if there is none, and significant differences."""

from pathlib import Path

import pytest

from qwen_serve.bench.gates.estimate import Paired
from qwen_serve.bench.gates.score import GateScore
from qwen_serve.bench.report.sweep import sweep_tables
from qwen_serve.bench.store import Results
from qwen_serve.bench.variants.standing import (
    Ranking,
    items_to_decide,
    margin,
    pareto_front,
    rank,
    verdict_of,
)
from tests.bench.variants.made import Made, gate, swept

PASS = gate("reading", 0.95, 0.90, 0.97, 0.80)
CLOSE = gate("sums", 0.85, 0.75, 0.92, 0.80)
FAIL = gate("sums", 0.60, 0.50, 0.70, 0.80)
FREE = gate("free", 0.5, 0.4, 0.6, None)


def ranked(results: Results) -> Ranking:
    (run,) = results.manifests
    return rank(results, run)


def test_front_keeps_what_nothing_beats_in_both() -> None:
    points = [("a", 1.0, 9.0), ("b", 2.0, 7.0), ("c", 1.5, 6.0), ("d", 3.0, 7.0), ("e", 3.0, 1.0)]
    assert pareto_front(points) == {"a", "d"}
    assert pareto_front([("a", 1.0, 1.0), ("b", 1.0, 1.0)]) == {"a", "b"}, "equals do not dominate"
    assert pareto_front([]) == set()


def test_margin_is_that_of_the_tightest_gate() -> None:
    assert margin([PASS, CLOSE]) == (pytest.approx(5.0), "sums")
    assert margin([FREE, gate("other", 0.7, 0.6, 0.8, None)]) == (pytest.approx(60.0), None)
    assert margin([]) == (None, None)


def test_one_gate_decides_for_all() -> None:
    assert verdict_of([PASS, CLOSE]) == "undecided"
    assert verdict_of([PASS, CLOSE, FAIL]) == "fail"
    assert verdict_of([PASS, FREE]) == "pass"
    assert verdict_of([FREE]) is None


def test_speed_is_a_geometric_mean(tmp_path: Path) -> None:
    # four times as fast in one cell of four, four times as slow in another: neither is faster
    slower = {("official", "short"): 0.25, ("distinct", "short"): 4.0}
    for baseline in ("even", "odd"):
        results = swept(
            tmp_path / baseline, Made("even", 100), Made("odd", 100, slower=slower), baseline=baseline
        )
        assert [s.speed.value for s in ranked(results).standings if s.speed] == pytest.approx([1.0, 1.0])


def test_no_ranking_depends_on_the_baseline(tmp_path: Path) -> None:
    quick_at_short = {("official", "short"): 0.1}
    variants = (
        Made("a", 100, [PASS]),
        Made("b", 100, [PASS], slower=quick_at_short),
        Made("c", 70, [PASS]),
    )
    baselines: list[str | dict[str, float]] = ["a", "b", "c", {"short": 50.0, "long": 400.0}]
    orders = []
    for number, baseline in enumerate(baselines):
        found = ranked(swept(tmp_path / str(number), *variants, baseline=baseline)).standings
        orders.append([s.name for s in sorted(found, key=lambda s: -(s.speed.value if s.speed else 0))])
    assert orders == [["b", "c", "a"]] * 4


def test_speed_against_given_medians(tmp_path: Path) -> None:
    made = swept(tmp_path, Made("slow", 200), Made("fast", 50), baseline={"short": 100.0, "long": 400.0})
    found = ranked(made)
    # slow: 100 / 200 and 400 / 400 under either protocol
    assert [s.speed.value for s in found.standings if s.speed] == pytest.approx([2**-0.5, 2**1.5])
    assert found.baseline == "given medians: short 100 ms, long 400 ms"


def test_the_fastest_that_passes_is_shipped(tmp_path: Path) -> None:
    tiny = Made("tiny", 50, [PASS, FAIL])
    found = ranked(swept(tmp_path, Made("big", 200, [PASS]), Made("small", 100, [PASS]), tiny))
    assert found.recommended == "small"
    shipped, failed = found.advice
    assert "Ship small: the fastest of the 2 that pass every gate, speed 2x [2, 2]" in shipped
    assert "+15.0 points at the tightest gate, reading: 95.0%" in shipped and "against 80.0%" in shipped
    assert failed == "tiny fails sums (60.0% against 80.0%)."


def test_a_faster_undecided_one_is_named_with_what_would_decide(tmp_path: Path) -> None:
    found = ranked(
        swept(
            tmp_path, Made("big", 200, [PASS]), Made("open", 100, [PASS, CLOSE]), Made("slow", 300, [CLOSE])
        )
    )
    assert found.recommended == "big"
    assert len(found.advice) == 2, "a slower undecided one could not change the choice"
    assert found.advice[1].startswith(
        "open is faster (2x [2, 2]) but undecided at this sample size: sums (85.0%"
    )
    assert "items would decide" in found.advice[1]


def test_nothing_that_is_undecided_is_shipped(tmp_path: Path) -> None:
    found = ranked(swept(tmp_path, Made("a", 200, [CLOSE]), Made("b", 100, [FAIL])))
    assert found.recommended is None
    assert found.advice[0].startswith("No variant is known to pass every gate: at this sample size")
    assert [line.split()[0] for line in found.advice[1:]] == ["a", "b"]


def test_none_passing_is_said_with_the_nearest(tmp_path: Path) -> None:
    worse = gate("sums", 0.3, 0.2, 0.4, 0.8)
    found = ranked(swept(tmp_path, Made("a", 100, [FAIL]), Made("b", 200, [worse])))
    assert found.recommended is None
    assert found.advice[0] == "No variant passes every gate. a comes nearest: it lacks 20.0 points at sums."


def test_what_the_rounds_do_not_tell_apart_is_said(tmp_path: Path) -> None:
    close = swept(
        tmp_path / "close", Made("a", 100, [PASS], scatter=0.2), Made("b", 101, [PASS], scatter=0.2), seed=0
    )
    assert ranked(close).recommended is not None
    (other,) = {"a", "b"} - {ranked(close).recommended}
    assert ranked(close).advice[1].startswith(f"{other} passes too, and 8 rounds do not tell its speed from")
    few = swept(tmp_path / "few", Made("a", 100, [PASS]), Made("b", 200, [PASS]), rounds=3)
    assert "b passes too, and 3 rounds are too few to tell its speed from a's" in ranked(few).advice[1]
    apart = swept(tmp_path / "apart", Made("a", 100, [PASS]), Made("b", 105, [PASS]))
    assert len(ranked(apart).advice) == 1


def test_without_thresholds_none_is_shipped(tmp_path: Path) -> None:
    found = ranked(swept(tmp_path, Made("a", 200, [FREE]), Made("b", 100, [FREE])))
    assert found.recommended is None
    assert found.advice == ["No gate with a threshold was asked: none is recommended. The fastest is b."]


def test_failures_are_listed_and_rank_nowhere(tmp_path: Path) -> None:
    broken = Made("b", 0, error="no room:\nlog")
    found = ranked(swept(tmp_path / "some", broken, Made("a", 100, [PASS])))
    assert found.advice[-1] == "b could not be measured: no room"
    assert not found.standings[0].front and found.standings[0].speed is None
    assert found.baseline == "a", "the first that was measured"
    none = ranked(swept(tmp_path / "none", broken))
    assert none.recommended is None
    assert none.advice == [
        "No variant could be measured: there is nothing to recommend.",
        "b could not be measured: no room",
    ]


def test_items_to_decide() -> None:
    sure = items_to_decide(gate("g", 1.0, 0.72, 1.0, 0.9, items=10))
    assert sure is not None and 30 < sure < 40, "Wilson's lower bound of n of n passes 90% at n = 35"
    assert items_to_decide(gate("g", 0.80, 0.70, 0.88, 0.801, items=60)) is None, "only all of them can"


def test_the_tables(tmp_path: Path) -> None:
    results = swept(
        tmp_path,
        Made("Q8_0", 200, [PASS], bits=8.5),
        Made("Q4_K_M", 100, [PASS, CLOSE]),
        Made("Q2_K", 0, error="the <disk> is full"),
    )
    standings, latencies = (table.markdown() for table in sweep_tables(results))
    assert "| Q8_0 | 8.50 | 8.50 | 0.00163 | 1 | 95.0 | - | +15.0 | pass, front, ship |" in standings
    assert (
        "| Q4_K_M | 4.50 | 4.50 | 0.01097 | 2x [2, 2] | 95.0 | 85.0 | +5.0 | undecided, front |" in standings
    )
    assert "| Q2_K | - | - | - | - | - | - | - | FAILED |" in standings
    assert "speed: times as fast as Q8_0, geometric mean" in standings
    assert "mean KLD" not in standings and "positions 0 to 511 of 512: every position" in standings
    assert "| Q4_K_M | 100 | 100 | 200 | 200 |" in latencies
    assert "\n\nShip Q8_0: " in standings


def test_what_is_lost_against_full_precision_is_said(tmp_path: Path) -> None:
    def asked(*paired: tuple[int, int]) -> list[GateScore]:
        names = ("reading", "sums")
        return [gate(n, 0.95, 0.9, 0.97, 0.8, 500, p) for n, p in zip(names, paired, strict=True)]

    variants = (
        Made("big", 200, asked((1, 2), (3, 2))),
        Made("small", 100, asked((9, 2), (30, 4))),
        Made("other", 300, [PASS]),
    )
    results = swept(tmp_path, *variants)
    big, small, other = ranked(results).standings
    assert (big.paired, small.paired, other.paired) == (Paired(4, 4), Paired(39, 6), None)
    advice = "\n".join(ranked(results).advice)
    assert "Worse than full precision, item by item: small (39 lost, 6 gained, p < 0.001)." in advice
    assert "Not shown to be worse than full precision: big (4 lost, 4 gained, p = 1)." in advice
    assert "Where no loss may show, ship big" in advice
    table, losses, _ = sweep_tables(results)
    columns = [list(table.header).index(name) for name in ("lost", "gained", "p")]
    assert [[row[column] for column in columns] for row in table.rows][:2] == [
        [4, 4, "1"],
        [39, 6, "5.4e-07"],
    ]
    assert "| small | 9, 2, p = 0.065 | 30, 4, p < 0.001 | 39, 6, p < 0.001 |" in losses.markdown()
    assert len(losses.rows) == 2, "of the other nothing was recorded"


def test_the_smallest_that_passes_is_shipped_where_none_was_timed(tmp_path: Path) -> None:
    lost, kept = (
        gate("sums", score, score, score, 0.80, 500, p) for score, p in ((0.6, (30, 4)), (0.9, (2, 1)))
    )
    sizes = {"tiny": 2.5, "big": 8.5, "small": 4.5}
    made = [Made(name, 0, [lost if name == "tiny" else kept], bits=bits) for name, bits in sizes.items()]
    found = ranked(swept(tmp_path / "all", *made, Made("open", 0, [CLOSE], bits=4.0), rounds=0))
    assert found.recommended == "small"
    shipped, open_, *others = found.advice
    assert shipped.startswith(
        "Ship small: the smallest of the 2 that pass every gate, 4.5 MB. Its margin is +10"
    )
    assert open_.startswith("open is smaller (4 MB) but undecided at this sample size: sums")
    assert others == [
        "tiny fails sums (60.0% against 80.0%).",
        "Worse than full precision, item by item: tiny (30 lost, 4 gained, p < 0.001).",
        "Not shown to be worse than full precision: small (2 lost, 1 gained, p = 1), "
        "big (2 lost, 1 gained, p = 1).",
        "No speed was measured.",
    ]
    found = ranked(swept(tmp_path / "one", made[0], rounds=0))
    assert found.recommended is None
    assert (
        found.advice[0] == "No variant passes every gate. tiny comes nearest: it lacks 20.0 points at sums."
    )
