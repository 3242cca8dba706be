"""The page, Markdown tables and published summary of a store are made from its rows alone."""

import json
import re
from importlib import import_module
from pathlib import Path

import pandas as pd
import pytest

from qwen_serve.bench.cli import main
from qwen_serve.bench.report.pictures import draw_pictures
from qwen_serve.bench.report.views import PICTURES, TABLES
from qwen_serve.bench.store import load
from tests.bench.made import Row, made_run

SERVERS = {"ours": 1.0, "llama-server, tuned": 1.25, "llama-server": 2.0}


def latencies(rounds: int = 10) -> list[Row]:
    return [
        (name, protocol, cell, number, {"latency": ms * times})
        for number in range(1, rounds + 1)
        for protocol in ("official", "distinct")
        for cell, ms in (("short", 100.0), ("long", 300.0))
        for name, times in SERVERS.items()
    ]


def rates(rounds: int = 10) -> list[Row]:
    return [
        (name, "random", f"{level} concurrent", number, {"output_rate": 200.0 * level / times})
        for number in range(1, rounds + 1)
        for level in (1, 8)
        for name, times in SERVERS.items()
    ]


def test_a_page_needs_nothing_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_run(tmp_path, [*latencies(), *rates()], model="<synthetic> & small", card="NVIDIA H200")
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert page.count('src="data:image/svg+xml') == 2, "latency and throughput"
    assert not re.search(r'(src|href)="(?!data:)', page), "no other file"
    assert "&lt;synthetic&gt; &amp; small" in page
    assert "<synthetic>" not in page
    assert "0.8x [0.8, 0.8]" in page
    assert "llama-server, tuned" in capsys.readouterr().out


def test_a_load_of_distinct_prompts_is_no_latency_protocol(tmp_path: Path) -> None:
    rows: list[Row] = [
        (name, "distinct", "8 concurrent", number, {"latency": 9.0, "output_rate": 100.0})
        for number in range(1, 6)
        for name in SERVERS
    ]
    made_run(tmp_path / "store", rows)
    assert list(draw_pictures(load([tmp_path]).frame, tmp_path)) == ["Throughput"]
    assert main(["report", str(tmp_path / "store"), "--publish", str(tmp_path / "out")]) == 0
    assert "| server | distinct, 8 at once, tok/s |" in (tmp_path / "out" / "README.md").read_text()


def test_runs_of_latency_and_throughput_get_their_own_tables(tmp_path: Path) -> None:
    run = made_run(
        tmp_path, [("s", "official", "short", 1, {"latency": 12.0})], verb="latency", endpoint="/invocations"
    )
    assert main(["report", str(run), "--out", str(tmp_path / "out")]) == 0
    assert "one request at a time" in (tmp_path / "out" / "report.html").read_text()


def test_a_run_that_stopped_says_so_and_an_empty_one_is_shown(tmp_path: Path) -> None:
    run = made_run(tmp_path, [])
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(manifest | {"status": "stopped"}))
    assert main(["report", str(tmp_path)]) == 0
    assert "This run did not finish (stopped)" in (tmp_path / "report.html").read_text()


def test_what_is_published_has_no_single_requests_and_comes_out_the_same_again(tmp_path: Path) -> None:
    many: list[Row] = [
        (name, "official", cell, number, {"latency": ms + step})
        for number in range(1, 11)
        for cell, ms in (("short", 100.0), ("long", 300.0))
        for name in SERVERS
        for step in range(50)
    ]
    made_run(tmp_path / "store", [*many, *rates()], model="synthetic 4B", card="NVIDIA H200")
    page = tmp_path / "benchmarks.md"
    page.write_text("# Ours\n\n<!-- headline -->\nold\n<!-- end -->\n\nbelow\n")
    folder = tmp_path / "published"
    command = ["report", str(tmp_path / "store"), "--publish", str(folder), "--page", str(page)]
    assert main([*command, "--reference", "ours"]) == 0
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(first) == {"README.md", "summary.csv", "runs.json", "latency.svg", "throughput.svg"}
    summary = pd.read_csv(folder / "summary.csv")
    short = summary[(summary["cell"] == "short") & (summary["subject"] == "ours")].iloc[0]
    assert (short["rounds"], short["values"], short["p50"]) == (10, 500, 124.5)
    assert len(summary) == 2 * 3 + 2 * 3
    text = page.read_text()
    assert text.startswith("# Ours\n\n<!-- headline -->\n**synthetic 4B on NVIDIA H200, 20")
    assert text.endswith("<!-- end -->\n\nbelow\n")
    assert "| llama-server, tuned | 224 (1x [1, 1]) | 160 (0.8x [0.8, 0.8]) |" in text
    assert "old" not in text
    assert main([*command, "--reference", "ours"]) == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first


def test_the_headline_begins_with_the_reference_and_says_where_rounds_are_few(tmp_path: Path) -> None:
    made_run(tmp_path / "store", rates(rounds=2))
    folder = tmp_path / "out"
    command = ["report", str(tmp_path / "store"), "--publish", str(folder), "--reference", "llama-server"]
    assert main(command) == 0
    lines = (folder / "README.md").read_text().splitlines()
    table = [line for line in lines if line.startswith("| ")]
    names = [line.split(" |")[0].removeprefix("| ") for line in table[2:5]]
    assert names == ["llama-server", "llama-server, tuned", "ours"]
    assert "| ours | 200 (2.00x) | 1,600 (2.00x) |" in table
    assert any("fewer than 8 rounds" in line for line in lines)


def test_what_cannot_be_reported_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_run(tmp_path / "store", rates(1))
    page = tmp_path / "page.md"
    page.write_text("no marks")
    publish = [run, "--publish", tmp_path / "out"]
    for words, message in (
        ([], "want at least one store or run"),
        ([tmp_path / "nothing"], "no run there"),
        ([run, "--metric", "latency"], "--metric latency: goes with --compare alone"),
        ([run, "--subject", "ours"], "--subject ours: goes with --compare alone"),
        ([*publish, "--reference", "x"], "--reference x: not measured; there are ours"),
        ([*publish, "--page", page], f"--page {page}: want a line <!-- headline -->"),
        ([*publish, "--page", tmp_path / "none"], f"--page {tmp_path}/none: cannot be read"),
    ):
        assert main(["report", *map(str, words)]) == 1
        assert message in capsys.readouterr().err
    assert page.read_text() == "no marks"


def test_open_loops_are_drawn_by_the_rate_offered(tmp_path: Path) -> None:
    rows: list[Row] = [("s", "random", f"{rate} req/s", 1, {"goodput": rate * 0.9}) for rate in (2, 4.5)]
    made_run(tmp_path, rows)
    made = draw_pictures(load([tmp_path]).frame, tmp_path)
    assert [path.name for path in made.values()] == ["goodput.svg"]
    assert ">4.5<" in (tmp_path / "goodput.svg").read_text()


@pytest.mark.parametrize("where", [*TABLES.values(), *PICTURES.values()])
def test_every_view_is_there(where: str) -> None:
    module, _, name = where.partition(":")
    assert callable(getattr(import_module(module), name))
