"""Measurements are kept if the process is killed, and are read as they were written."""

import json
import sys
from pathlib import Path

import pytest

from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.store import COLUMNS, MANIFEST, ROWS, Run, load, manifests


def begin(store: Path, verb: str = "latency") -> Run:
    return Run.begin(store, verb, settings={"runs": 3}, card="a card", notes=["beside a compiler"])


def test_rows_come_back_as_they_were_added(tmp_path: Path) -> None:
    with begin(tmp_path) as run:
        run.describe("ours", url="http://x", model="nano")
        run.describe("ours", counted_by="/tokenize")
        run.add("ours", "official", "short", 1, {"latency": 12.5, "claimed_tokens": 128})
        run.add("ours", "official", "short", 2, {"latency": 13.5})
    results = load([tmp_path])
    assert list(results.frame.columns) == list(COLUMNS)
    assert results.frame["value"].tolist() == [12.5, 128.0, 13.5]
    assert results.frame["unit"].tolist() == ["ms", "tokens", "ms"]
    assert results.of(metric="latency", cell=["short", "long"])["round"].tolist() == [1, 2]
    (manifest,) = results.manifests.values()
    assert (manifest.status, manifest.card, manifest.settings) == ("finished", "a card", {"runs": 3})
    assert manifest.subjects["ours"] == {"url": "http://x", "model": "nano", "counted_by": "/tokenize"}
    assert manifest.notes == ["beside a compiler"]


def test_an_interrupted_run_keeps_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), begin(tmp_path) as run:
        run.add("ours", "official", "short", 1, {"latency": 12.5})
        raise KeyboardInterrupt
    results = load([tmp_path])
    assert results.frame["value"].tolist() == [12.5]
    (manifest,) = results.manifests.values()
    assert manifest.status == "stopped"
    assert manifest.notes[-1] == "STOPPED: interrupted"


def test_a_killed_process_loses_at_most_the_row_it_was_writing(tmp_path: Path) -> None:
    run = begin(tmp_path)
    run.add("ours", "official", "short", 1, {"latency": 12.5})
    with (run.folder / ROWS).open("a") as rows:
        rows.write('{"subject": "ours", "workl')
    results = load([tmp_path])  # never closed
    assert results.frame["value"].tolist() == [12.5]
    assert results.manifests[run.folder.name].status == "running"


def test_a_run_that_measured_nothing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(BenchError), begin(tmp_path):
        raise BenchError("nothing listens")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(BenchError), begin(tmp_path) as run:
        (run.folder / "server.log").write_text("why")
        raise BenchError("it did not start")
    assert (run.folder / "server.log").exists()


def test_runs_of_one_second_have_folders_of_their_own(tmp_path: Path) -> None:
    folders = {begin(tmp_path).folder for _ in range(3)}
    assert len(folders) == 3
    assert len(load([tmp_path]).manifests) == 3
    assert len(load([*folders, tmp_path]).manifests) == 3, "a run that is named twice counts once"


def test_only_known_metrics_and_finite_values(tmp_path: Path) -> None:
    run = begin(tmp_path)
    with pytest.raises(KeyError):
        run.add("ours", "official", "short", 1, {"speed": 1.0})
    with pytest.raises(ValueError, match="latency is nan"):
        run.add("ours", "official", "short", 1, {"latency": float("nan")})
    assert (run.folder / ROWS).read_text() == ""


def test_secrets_are_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "latency", "--api-key", "hush", "--runs", "3", "--api-key=hush"])
    run = begin(tmp_path)
    assert run.manifest.command == [
        "qwen-bench",
        "latency",
        "--api-key",
        "***",
        "--runs",
        "3",
        "--api-key=***",
    ]
    assert "hush" not in (run.folder / MANIFEST).read_text()


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no run there"):
        load([tmp_path])
    run = begin(tmp_path)
    (run.folder / ROWS).write_text('{"subject": "ours"}\n')
    with pytest.raises(BenchError, match=r"rows.jsonl, line 1: not a row"):
        load([tmp_path])
    (run.folder / MANIFEST).write_text(json.dumps({"run": "x", "verb": "latency", "command": []}))
    with pytest.raises(BenchError, match="not a manifest: started"):
        load([tmp_path])


def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), begin(tmp_path, "sweep") as run:
        run.add("ours", "official", "short", 1, {"latency": 12.5})
        run.add("ours", "official", "short", 2, {"latency": 99.0})
        raise KeyboardInterrupt
    (before,) = manifests(tmp_path).values()
    with Run.resume(run.folder, lambda row: row["round"] == 1) as again:
        assert again.manifest.status == "running"
        again.add("ours", "official", "short", 2, {"latency": 13.5})
    results = load([tmp_path])
    assert results.of(metric="latency")[["round", "value"]].to_numpy().tolist() == [[1, 12.5], [2, 13.5]]
    (manifest,) = results.manifests.values()
    assert (manifest.status, manifest.notes, manifest.run) == ("finished", ["beside a compiler"], before.run)
    assert manifest.seconds > before.seconds > 0, "the time of both"


def test_manifests_alone(tmp_path: Path) -> None:
    assert manifests(tmp_path / "nowhere") == {}
    folders = []
    for name in ("b", "a"):
        with begin(tmp_path / name) as run:
            run.add("ours", "official", "short", 1, {"latency": 12.5})
        folders.append(run.folder)
    found = manifests(tmp_path)
    assert set(found) == set(folders)
    assert [one.started for one in found.values()] == sorted(one.started for one in found.values())
