"""The verb that measures speculation: its tasks, its arithmetic, and a small run against real servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import figures
from bench.errors import BenchError
from bench.options import run as run_verb
from bench.speculation import HELDOUT, Run, SpeculationResult, main, nano_tasks, parser, summarize


def one(drafter: str, seconds: float, *, steps: int = 0, drafted: int = 0, accepted: int = 0) -> Run:
    return Run(
        drafter=drafter,
        group="g",
        seconds=seconds,
        tokens=10,
        steps=steps,
        drafted=drafted,
        accepted=accepted,
        same=True,
    )


def test_tasks_are_drawn_from_every_family_and_reasoning_twice() -> None:
    tasks = nano_tasks(HELDOUT, 6, seed=1)
    assert tasks == nano_tasks(HELDOUT, 6, seed=1)
    assert tasks != nano_tasks(HELDOUT, 6, seed=2)
    groups = [task.group for task in tasks]
    assert groups.count("knowledge") == groups.count("instructions") == groups.count("reasoning") == 6
    assert groups.count("reasoning, thinking") == 6
    assert groups.count("continuation") + groups.count("repeated text") == 6
    assert all(bool(task.messages) != bool(task.prompt) for task in tasks)


def test_a_folder_without_tasks_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"knowledge\.jsonl: cannot be read"):
        nano_tasks(tmp_path, 1, seed=0)


def test_sums_by_drafter() -> None:
    runs = [
        one("off", 1.0),
        one("both", 0.4, steps=2, drafted=8, accepted=6),
        one("off", 3.0),
        one("both", 1.6, steps=1, drafted=2, accepted=0),
    ]
    off, both = summarize(runs)
    assert (off.seconds_per_token, off.speedup, off.accepted_share) == (0.2, None, None)
    assert both.speedup == pytest.approx(2)
    assert (both.drafted, both.accepted, both.accepted_share, both.mean_accepted_length) == (10, 6, 0.6, 2)


def test_servers_are_started_asked_and_compared(
    nano_q4_k_m: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    command = ["--model", str(nano_q4_k_m), "--drafters", "off,both", "--items", "1", "--max-tokens", "40"]
    more = ["--threads", "1", "--logs", str(tmp_path), "--always", "--out", str(out)]
    assert run_verb(parser(), main, [*command, *more]) == 0
    result = SpeculationResult.load(out)
    assert {summary.drafter for summary in result.summaries} == {"off", "both"}
    assert sum(summary.drafted for summary in result.summaries if summary.drafter == "both") > 0
    assert not any(summary.drafted for summary in result.summaries if summary.drafter == "off")
    assert "speed-up" in capsys.readouterr().out
    assert out.with_suffix(".png").stat().st_size > 1000
    assert any("both: per token" in name for name in figures.figures_of(json.loads(out.read_text())))


def test_an_unknown_drafter_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--model", "x.gguf", "--drafters", "off,eagle"])
    assert "want some of off, ngram, mtp, both" in capsys.readouterr().err
