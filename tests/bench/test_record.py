"""The file of a record: its contents, what it must not contain, and how a run is continued."""

import getpass
import json
import platform
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jsonschema
import pytest

from qwen_serve.bench.cli import main
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.experiments import run as series
from qwen_serve.bench.experiments.run import Experiment, finished_run
from qwen_serve.bench.gates.gate import NANO_NAMES
from qwen_serve.bench.record import clocks as clocks_module
from qwen_serve.bench.record import command, document
from qwen_serve.bench.record.clocks import clocks, sampled
from qwen_serve.bench.record.document import MOST_BYTES, Record, schema
from qwen_serve.bench.record.page import community, html, records_in
from qwen_serve.bench.servers.launch import free_port
from qwen_serve.bench.store import Run
from tests.bench.made import Row
from tests.processes import run
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
COMMUNITY = ROOT / "docs" / "results" / "community"
ROWS: dict[str, list[Row]] = {
    "start": [("qwen-serve", "start", "ready", 1, {"start_time": 4.5})],
    "official": [("qwen-serve", "official", "short", 1, {"latency": 120.0, "steps": 3.0})],
    "distinct": [("qwen-serve", "distinct", "short", 1, {"latency": 140.0})],
    **{
        f"throughput-{level}": [
            ("qwen-serve", "distinct", f"{level} concurrent", 1, {"output_rate": 200.0 + level, "ttft": 30.0})
        ]
        for level in (1, 8, 64)
    },
    **{
        name: [("http://127.0.0.1:8098", "gates", name, 1, {"score": 70.0, "items": 2.0})]
        for name in NANO_NAMES
    },
}


class NoServer:
    """Stand-in for the gates' server."""

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parts that were run, in order. Each records its `ROWS` without measuring."""
    done: list[str] = []

    def run_part(words: Sequence[str]) -> str:
        folder = Path(words[words.index("--out") + 1])
        monkeypatch.setattr(sys, "argv", ["qwen-bench", *words])
        with Run.begin(folder.resolve(), "made", settings={"key": "sk-secret"}) as run:
            done.append(folder.name)
            run.describe("qwen-serve", command=["--model", "/home/me/x.gguf"], url="http://me.example")
            for subject, workload, cell, round, values in ROWS[folder.name]:
                run.add(subject, workload, cell, round, values)
        return "finished"

    monkeypatch.setattr(series, "run_part", run_part)
    monkeypatch.setattr(command, "_server", lambda *_: NoServer())
    monkeypatch.setattr(clocks_module, "asked", lambda fields: None)
    return done


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def recorded(measured: list[str], tmp_path: Path, port: int) -> Callable[..., int]:
    gguf = tmp_path / "m<b>.gguf"
    gguf.write_bytes(b"GGUF")

    def record(*flags: str) -> int:
        where = ["--port", str(port), "--out", str(tmp_path / "out")]
        return main(["record", str(gguf), "--tasks", "nano", *where, *flags])

    return record


def test_every_part_is_in_the_file_and_nothing_personal(
    recorded: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert recorded() == 0
    text = (tmp_path / "out" / "record.json").read_text()
    made = Record.read(tmp_path / "out" / "record.json")
    assert made.parts == dict.fromkeys(ROWS, "finished")
    jsonschema.validate(json.loads(text), schema())
    assert {(row.part, row.metric) for row in made.rows} >= {
        ("official", "latency"),
        ("throughput-64", "output_rate"),
        ("nano_reasoning", "score"),
        ("start", "start_time"),
    }
    assert "steps" not in text
    for private in (str(tmp_path), "/home", "me.example", "127.0.0.1", "sk-secret", platform.node()):
        assert private not in text, private
    assert f'"{getpass.getuser()}"' not in text
    page = (tmp_path / "out" / "record.html").read_text()
    assert "m&lt;b&gt;.gguf" in page
    assert "264" in page, "tokens a second at 64"
    assert "Throughput" in capsys.readouterr().out


@pytest.mark.parametrize("after", [4, 7])
def test_it_goes_on_after_an_interruption(
    recorded: Callable[..., int],
    measured: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    after: int,
) -> None:
    """During the loads and during the gates. The page shows the finished parts."""
    run_part = series.run_part

    def interrupted(words: Sequence[str]) -> str:
        if len(measured) == after:
            signal.raise_signal(signal.SIGINT)
        return run_part(words)

    monkeypatch.setattr(series, "run_part", interrupted)
    assert recorded() == 130
    assert measured == [*ROWS][:after]
    states = Record.read(tmp_path / "out" / "record.json").parts
    assert [name for name, state in states.items() if state == "finished"] == measured
    assert f"Not measured: {[*ROWS][after]}" in (tmp_path / "out" / "record.html").read_text()
    monkeypatch.setattr(series, "run_part", run_part)
    assert recorded() == 0
    assert measured == list(ROWS), "each once"
    assert recorded() == 0
    assert measured == list(ROWS)


def test_a_part_that_fails_is_missing(
    recorded: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_part = series.run_part

    def failing(words: Sequence[str]) -> str:
        return "exit status 1" if words[0] == "quality" else run_part(words)

    monkeypatch.setattr(series, "run_part", failing)
    assert recorded() == 1
    assert "missing: nano_knowledge, nano_instructions, nano_reasoning" in capsys.readouterr().err
    assert Record.read(tmp_path / "out" / "record.json").parts["nano_reasoning"] == "missing"
    assert "Not measured: nano_knowledge" in (tmp_path / "out" / "record.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.gguf"], "none.gguf: not a file"),
        ([str(Path(__file__)), "--tasks", "all"], "--tasks all: want"),
    ],
)
def test_mistakes_are_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", *words]) == 1
    assert message in capsys.readouterr().err


def test_another_server_is_not_measured(
    recorded: Callable[..., int], measured: list[str], port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", port)):
        assert recorded() == 1
    assert f"--port {port}: something listens there" in capsys.readouterr().err
    assert "nano_knowledge" not in measured


def test_both_experiments_have_the_same_parts() -> None:
    whole, quick = (Experiment.read(Path(name)) for name in ("card", "card-quick"))
    assert [part.name for part in whole.parts] == [part.name for part in quick.parts]
    assert [*whole.needs] == [*quick.needs]
    assert {part.name for part in whole.parts} - {"gates"} == {*ROWS} - {*NANO_NAMES}


def test_a_finished_run_is_the_last_of_its_command(
    measured: list[str], recorded: Callable[..., int], tmp_path: Path
) -> None:
    recorded()
    words = ["latency"]
    assert finished_run(words, tmp_path / "out" / "official") is None
    assert finished_run(words, tmp_path / "nothing") is None


def some(tmp_path: Path, recorded: Callable[..., int], *flags: str) -> dict[str, object]:
    recorded(*flags)
    made: dict[str, object] = json.loads((tmp_path / "out" / "record.json").read_text())
    return made


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"commit": "/home/me"}, "commit"),
        ({"versions": {"python": "3.12 /opt/me"}}, "versions"),
        ({"hostname": "mine"}, "hostname"),
        ({"rows": [{"part": "x"}]}, "rows"),
        ({"versions": {str(n): "x" * 100 for n in range(2000)}}, f"want at most {MOST_BYTES:,}"),
    ],
)
def test_what_is_no_record_is_refused(
    tmp_path: Path, recorded: Callable[..., int], change: dict[str, object], message: str
) -> None:
    made = some(tmp_path, recorded)
    file = tmp_path / "changed.json"
    file.write_text(json.dumps({**made, **change}))
    with pytest.raises(BenchError, match=message):
        Record.read(file)


def test_the_repository_s_records_are_records() -> None:
    """CI checks files that users send in with this test."""
    kept = json.loads((COMMUNITY / "schema.json").read_text())
    assert kept == schema(), "write it anew: json.dumps(schema(), indent=1)"
    for name in records_in(COMMUNITY):
        jsonschema.validate(json.loads((COMMUNITY / name).read_text()), kept)


def test_the_page_shows_each_as_its_senders(tmp_path: Path, recorded: Callable[..., int]) -> None:
    folder = tmp_path / "community"
    folder.mkdir()
    assert community(records_in(folder)) == "Nothing has come yet.\n"
    text = json.dumps(some(tmp_path, recorded))
    (folder / "some-one--A10G-4B.json").write_text(text)
    page = community(records_in(folder))
    assert "Sent by [some-one](https://github.com/some-one)" in page
    assert "| official, ms |" in page
    (folder / "A10G.json").write_text(text)
    with pytest.raises(BenchError, match="want SENDER--CARD-MODEL"):
        records_in(folder)
    (folder / "A10G.json").unlink()
    (folder / "a--b.json").write_text(text.replace('"quick": false', '"quick": true'))
    with pytest.raises(BenchError, match="a quick run"):
        records_in(folder)


def test_clocks_are_those_of_a_busy_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Callable[..., int]
) -> None:
    tools, file = tmp_path / "tools", tmp_path / "clocks.jsonl"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(
        '#!/bin/sh\ncase "$*" in *max.sm*) echo "1710, 6251, [N/A]";;\n'
        '*) echo "1500, 6251, 140.5, 61, 99";; esac\n'
    )
    (tools / "nvidia-smi").chmod(0o755)
    monkeypatch.undo()
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    with sampled(file, seconds=0.001):
        wait_until(lambda: file.is_file() and len(file.read_text().splitlines()) >= 3)
    with file.open("a") as more:
        more.write("[300, 405, 20.0, 30, 0]\n[300, 4")  # idle, and a line that was cut
    found = clocks(file)
    assert found is not None
    assert (found.sm.p10, found.sm.p50, found.sm_most, found.power_limit) == (1500, 1500, 1710, None)
    assert found.power.p50 == 140.5
    assert clocks(tmp_path / "none.jsonl") is None


def test_a_quick_run_says_so(tmp_path: Path, recorded: Callable[..., int]) -> None:
    assert some(tmp_path, recorded, "--quick")["quick"] is True
    made = Record.read(tmp_path / "out" / "record.json")
    assert "its figures say nothing" in html(made)
    assert {row.metric for row in made.rows} <= {*document.KEPT}


@pytest.mark.slow
def test_nano_is_recorded(nano_q4_k_m: Path, tmp_path: Path) -> None:
    """With real servers, requests and gates."""
    words = ["record", str(nano_q4_k_m), "--quick", "--tasks", "nano", "--port", str(free_port())]
    command_line = [sys.executable, "-m", "qwen_serve.bench", *words, "--out", str(tmp_path / "out")]
    done = run(command_line, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    made = Record.read(tmp_path / "out" / "record.json")
    assert set(made.parts.values()) == {"finished"}
    assert {row.part for row in made.rows} == {*ROWS}
    assert str(tmp_path) not in made.text()
