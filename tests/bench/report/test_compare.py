"""Comparisons are paired within a run and unpaired across runs, and the table says which."""

from pathlib import Path

import numpy as np
import pytest

from qwen_serve.bench.analysis.statistics import compare_subjects
from qwen_serve.bench.cli import main
from qwen_serve.bench.store import load
from tests.bench.made import Row, made_run

CELLS = ("short", "long")


def rows(subject: str, times: float, *, rounds: int = 10, drift: float = 0.0) -> list[Row]:
    """Latencies of ``times`` * 100 ms. ``drift``: factor of each round, the same for all subjects."""
    noise = np.random.default_rng(1).normal(0.0, drift, rounds)
    return [
        (subject, "distinct", cell, number, {"latency": 100.0 * times * float(np.exp(noise[number - 1]))})
        for number in range(1, rounds + 1)
        for cell in CELLS
    ]


def test_rounds_of_one_run_are_paired(tmp_path: Path) -> None:
    """Drift affects both subjects alike, so a difference of 5% is found under a drift of 20%."""
    made_run(tmp_path, [*rows("a", 1.0, drift=0.2), *rows("b", 1.05, drift=0.2)])
    found = compare_subjects(load([tmp_path]).frame, "b", "a", "latency")
    assert found is not None
    assert found.paired
    assert found.significant
    assert found.value == pytest.approx(1 / 1.05)


def test_runs_are_not_paired_and_the_text_says_so(tmp_path: Path) -> None:
    made_run(tmp_path, rows("a", 1.0, drift=0.2))
    made_run(tmp_path, rows("b", 1.05, drift=0.2, rounds=9))
    found = compare_subjects(load([tmp_path]).frame, "b", "a", "latency")
    assert found is not None
    assert not found.paired
    assert not found.significant
    assert "not told apart, unpaired" in found.verdict


def test_few_rounds_have_no_interval(tmp_path: Path) -> None:
    made_run(tmp_path, [*rows("a", 1.0, rounds=3), *rows("b", 2.0, rounds=3)])
    found = compare_subjects(load([tmp_path]).frame, "b", "a", "latency")
    assert found is not None
    assert found.verdict == "0.5x, fewer than 8 rounds"


def test_what_has_no_better_side_or_no_shared_cell_is_not_compared(tmp_path: Path) -> None:
    made_run(
        tmp_path,
        [
            ("a", "w", "one", 1, {"chunks": 1.0, "latency": 5.0}),
            ("b", "w", "other", 1, {"chunks": 1.0, "latency": 5.0}),
        ],
    )
    frame = load([tmp_path]).frame
    assert compare_subjects(frame, "b", "a", "chunks") is None
    assert compare_subjects(frame, "b", "a", "latency") is None
    assert compare_subjects(frame, "a", "a", "latency") is None
    assert compare_subjects(frame, "nobody", "a", "latency") is None


def test_the_command_sets_a_run_beside_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = made_run(tmp_path, rows("server", 1.0), quant="Q4_K_M")
    after = made_run(tmp_path, rows("server", 0.5), quant="Q2_K")
    assert main(["report", "--compare", str(before), str(after)]) == 0
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if f"{after.name}: server" in line]
    assert all("2x [2, 2], unpaired" in line for line in lines)
    assert len(lines) == len(CELLS) + 1, "each cell, and all of them"
    (line,) = [line for line in shown.splitlines() if line.strip().startswith("quant")]
    assert line.split() == ["quant", "Q4_K_M", "Q2_K"]


def test_the_reference_is_the_runs_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = [*rows("a", 1.0), *rows("b", 2.0)]
    first = made_run(tmp_path, both, reference="b")
    second = made_run(tmp_path, both, reference="a")
    for words, expected in (
        ([first], "times as good as b"),
        ([first, "--reference", "a"], "times as good as a"),
        ([first, second], f"times as good as {first.name}: b"),
    ):
        assert main(["report", "--compare", *map(str, words)]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert expected in shown


def test_what_cannot_be_compared_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = made_run(tmp_path / "alone", rows("a", 1.0))
    both = made_run(tmp_path / "both", [*rows("a", 1.0), *rows("b", 1.0)])
    for words, message in (
        ([], "want at least one store or run"),
        ([alone], "one subject alone, a: want two or more"),
        ([both, "--reference", "c"], "c: not measured; there are a, b"),
        ([both, "--subject", "c"], "c: not measured; there are a, b"),
        ([both, "--metric", "ttft"], "--metric ttft: not measured; there are latency"),
        ([tmp_path / "nothing"], "no run there"),
    ):
        assert main(["report", "--compare", *map(str, words)]) == 1
        assert message in capsys.readouterr().err
