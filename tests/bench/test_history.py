"""The history: what is committed is in order, and nothing gets in that is not."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bench import history
from bench.errors import BenchError
from bench.history_record import Experiment, Source, schema
from bench.history_report import lineage_points, points
from bench.history_store import FOLDER, SCHEMA, append, check, lineage, load, parent_digest
from bench.options import run

ROOT = Path(__file__).parents[2]


def record(name: str, value: float = 100.0, **changes: Any) -> Experiment:
    """A record by hand; keys of ``changes`` replace its fields."""
    fields = {
        "name": name,
        "date": "2026-11-01T12:00:00Z",
        "changed": "something",
        "fixed": {"model": "m.gguf"},
        "figures": {"latency": {"value": value, "unit": "ms", "better": "lower"}},
        "validity": "valid",
        "command": ["bench.latency"],
        "card": "A10G, 570.1",
    }
    return Experiment.model_validate(fields | changes)


def child(folder: Path, parent: str, name: str, value: float, **changes: Any) -> Experiment:
    return record(name, value, parent=parent, parent_digest=parent_digest(folder, parent), **changes)


def command(*arguments: object) -> int:
    return run(history.parser(), history.history, [str(argument) for argument in arguments])


# what is committed


def test_every_committed_record_is_in_order() -> None:
    records = check(FOLDER)
    assert records, "the history is not empty"
    for one in records.values():
        assert one.command
        assert one.card
        assert one.date.tzinfo is not None
        assert all(figure.unit for figure in one.figures.values())
        assert any(figure.source for figure in one.figures.values()), f"{one.name}: no figure cites a file"
        assert one.parent is None or records[one.parent].date <= one.date


def test_the_committed_schema_is_the_code_s() -> None:
    assert (FOLDER / SCHEMA).read_text(encoding="utf-8") == schema()


def test_sources_lie_in_the_repository() -> None:
    for one in load(FOLDER).values():
        for figure in one.figures.values():
            if figure.source is not None:
                (FOLDER / figure.source.file).resolve().relative_to(ROOT)


# adding


def test_what_is_added_is_there_and_earlier_records_are_untouched(tmp_path: Path) -> None:
    first = append(tmp_path, record("first"))
    before = (first.read_bytes(), first.stat().st_mtime_ns)
    append(tmp_path, child(tmp_path, "first", "second", 80.0))
    assert (first.read_bytes(), first.stat().st_mtime_ns) == before
    assert list(check(tmp_path)) == ["first", "second"]
    assert [one.name for one in lineage(load(tmp_path), "second")] == ["first", "second"]
    with pytest.raises(BenchError, match=r"first\.json: already on record; records are never rewritten"):
        append(tmp_path, record("first", 1.0))
    assert (first.read_bytes(), first.stat().st_mtime_ns) == before
    assert {path.name for path in tmp_path.iterdir()} == {"first.json", "second.json"}


def test_of_many_writers_of_one_name_one_wins(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from bench.errors import BenchError
from bench.history_store import append
from tests.bench.test_history import record
folder, number = Path(sys.argv[1]), sys.argv[2]
append(folder, record("mine-" + number))
try:
    append(folder, record("same", float(number)))
    print("won")
except BenchError:
    print("lost")
"""

    def write(number: int) -> str:
        arguments = [sys.executable, "-c", code, str(tmp_path), str(number)]
        done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(write, range(4)))
    assert sorted(outcomes) == ["lost", "lost", "lost", "won"]
    records = check(tmp_path)
    assert set(records) == {"same", *(f"mine-{number}" for number in range(4))}
    assert records["same"].figures["latency"].value == outcomes.index("won")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"figures": {}}, "figures"),
        ({"figures": {"latency": {"value": 1.0, "better": "lower"}}}, "unit"),
        ({"figures": {"latency": {"value": float("nan"), "unit": "ms", "better": "lower"}}}, "finite"),
        ({"command": []}, "command"),
        ({"card": ""}, "card"),
        ({"date": "2026-11-01T12:00:00"}, "timezone"),
        ({"fixed": {}}, "fixed"),
        ({"validity": "risky"}, "risky if and only if"),
        ({"risks": ["one run"]}, "risky if and only if"),
        ({"parent": "first"}, "come together"),
        ({"name": "No Spaces"}, "pattern"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_what_a_record_needs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        record(**({"name": "one"} | changes))


def test_parents_must_be_there_older_and_unchanged(tmp_path: Path) -> None:
    first = append(tmp_path, record("first"))
    with pytest.raises(BenchError, match=r"--parent other: not on record; there are first"):
        child(tmp_path, "other", "second", 80.0)
    with pytest.raises(BenchError, match=r"second\.json: date: 2026-10.* is before its parent's, 2026-11"):
        append(tmp_path, child(tmp_path, "first", "second", 80.0, date="2026-10-01T00:00:00Z"))
    append(tmp_path, child(tmp_path, "first", "second", 80.0))
    reordered = dict(reversed(json.loads(first.read_text()).items()))
    first.write_text(json.dumps(reordered))  # the same record in other words
    check(tmp_path)
    reordered["figures"]["latency"]["value"] = 200.0
    first.write_text(json.dumps(reordered))
    with pytest.raises(BenchError, match=r"second\.json: parent_digest: first is not what it was"):
        check(tmp_path)
    first.unlink()
    with pytest.raises(BenchError, match=r"second\.json: parent: first is not on record"):
        check(tmp_path)


def test_files_that_are_no_records(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no such folder"):
        load(tmp_path / "none")
    path = append(tmp_path, record("first"))
    path.rename(tmp_path / "other.json")
    with pytest.raises(BenchError, match=r"other\.json: name: 'first' must be the file's own, 'other'"):
        load(tmp_path)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(BenchError, match=r"other\.json: not a record: name: Field required"):
        load(tmp_path)


# where figures come from


@pytest.fixture
def results(tmp_path: Path) -> Path:
    path = tmp_path / "latency.json"
    lines = [
        {"protocol": protocol, "category": category, "latency": {"p50": seconds}}
        for protocol, category, seconds in (
            ("official", "short", 0.1),
            ("official", "long", 0.3),
            ("distinct", "short", 0.5),
        )
    ]
    document = {
        "kind": "latency",
        "command": ["bench.latency", "--runs", "10"],
        "started": "2026-11-02T10:00:00Z",
        "card": "H200, 570.1",
        "versions": {"python": "3.11"},
        "summaries": lines,
        "a/b": {"x": 1, "y": 3},
    }
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("/summaries/1/latency/p50", 0.3),
        ("/summaries/[protocol=official]/latency/p50", 0.2),
        ("/summaries/[protocol=official][category=short]/latency/p50", 0.1),
        ("/summaries/*/latency/p50", 0.3),
        ("/a~1b/*", 2),
    ],
)
def test_paths_into_a_result_file(results: Path, path: str, value: float) -> None:
    assert Source(file=results.name, path=path, scale=10).read(results.parent) == pytest.approx(10 * value)


@pytest.mark.parametrize(
    "path", ["/nothing", "/summaries/7/latency/p50", "/summaries/*/protocol", "/command/*"]
)
def test_paths_to_no_numbers(results: Path, path: str) -> None:
    with pytest.raises(BenchError, match=r"latency\.json: /.* finds .*numbers are needed"):
        Source(file=results.name, path=path).read(results.parent)


def test_add_reads_the_result_file_and_check_reads_it_again(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "history"
    wanted = ["--changed", "the beginning", "--fixed", "model=m.gguf", "--dir", folder, "--from", results]
    official = "official mean=/summaries/[protocol=official]/latency/p50*1000 ms lower"
    assert command("add", "plain", *wanted, "--figure", official, "--figure", "weights=2.6 GB lower") == 0
    one = check(folder)["plain"]
    assert one.figures["official mean"].value == pytest.approx(200)
    assert one.figures["weights"].source is None
    assert (one.card, one.command) == ("H200, 570.1", ["bench.latency", "--runs", "10"])
    assert one.date.isoformat() == "2026-11-02T10:00:00+00:00"
    assert command("check", "--dir", folder) == 0
    results.write_text(results.read_text().replace("0.3", "0.4"))
    assert command("check", "--dir", folder) == 1
    shown = capsys.readouterr()
    assert "1 records, all in order" in shown.out
    assert "plain.json: figures.official mean: value 200.0 is not what ../latency.json holds" in shown.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--figure", "mean=fast"], "want NAME=VALUE UNIT lower"),
        (["--figure", "mean=fast ms lower"], "want a number, or a path"),
        (["--figure", "mean=/a ms lower"], "give --from FILE"),
        (["--figure", "mean=1 ms lower", "--from", "/none.json"], "error: /none.json: cannot be read"),
        (["--figure", "mean=1 ms lower", "--parent", "none"], "--parent none: not on record"),
        (["--figure", "mean=1 ms lower", "--card", "A10G"], "command: .*; give --command or --from"),
        (["--card", "A10G", "--command", "make it"], "figures: "),
    ],
)
def test_errors_of_add(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = ["--changed", "x", "--fixed", "a=b", "--dir", tmp_path / "history"]
    assert command("add", "one", *wanted, *flags) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert re.search(message, error), error
    assert not list(tmp_path.rglob("*.json"))


# pictures


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three steps of one lineage, one of them risky, and a stranger on another card."""
    where = tmp_path / "records"
    append(where, record("base", 100.0))
    append(where, child(where, "base", "cache", 60.0, date="2026-11-02T00:00:00Z"))
    risky = {"validity": "risky", "risks": ["one run"], "date": "2026-11-03T00:00:00Z"}
    append(where, child(where, "cache", "gamble", 30.0, **risky))
    append(where, child(where, "cache", "slower", 70.0, date="2026-11-04T00:00:00Z"))
    append(where, record("elsewhere", 10.0, card="H200, 570.1", date="2026-11-05T00:00:00Z"))
    return where


def test_the_frontier_leaves_out_what_is_risky_and_does_not_mix_cards(folder: Path) -> None:
    leads = {point.record.name: point.leads for point in points(list(load(folder).values()), "latency")}
    assert leads == {"base": True, "cache": True, "gamble": False, "slower": False, "elsewhere": True}


def test_the_way_to_a_record(folder: Path) -> None:
    name, found = lineage_points(lineage(load(folder), "slower"), None)
    assert name == "latency"
    assert [point.record.name for point in found] == ["base", "cache", "slower"]
    append(folder, child(folder, "slower", "moved", 5.0, card="H200, 570.1", date="2026-11-06T00:00:00Z"))
    with pytest.raises(BenchError, match=r"measured on several cards: A10G, 570\.1, H200, 570\.1"):
        lineage_points(lineage(load(folder), "moved"), "latency")


def test_pictures_and_tables(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frontier, waterfall = tmp_path / "frontier.svg", tmp_path / "lineage.svg"
    assert command("frontier", "--figure", "latency", "--dir", folder, "--plot", frontier) == 0
    assert command("lineage", "gamble", "--dir", folder, "--plot", waterfall) == 0
    assert command("show", "--dir", folder) == 0
    assert command("show", "gamble", "--dir", folder) == 0
    shown = capsys.readouterr().out
    assert "best so far" in shown
    assert "-40.0" in shown
    assert "3.33" in shown  # times faster than at the beginning
    assert "risk: one run" in shown
    assert "gamble (risky)" in frontier.read_text()
    assert "the way to gamble" in waterfall.read_text()


def test_figures_that_cannot_be_drawn_together(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("frontier", "--figure", "speed", "--dir", folder) == 1
    assert command("lineage", "nobody", "--dir", folder) == 1
    other = {"figures": {"latency": {"value": 1.0, "unit": "s", "better": "lower"}}}
    append(folder, record("seconds", **other))
    assert command("frontier", "--figure", "latency", "--dir", folder) == 1
    error = capsys.readouterr().err
    assert "--figure speed: in no record; there are latency" in error
    assert "nobody: not on record; there are base, cache, gamble, slower, elsewhere" in error
    assert "--figure latency: not the same in every record: " in error
