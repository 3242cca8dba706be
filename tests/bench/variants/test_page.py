"""The report: complete, readable without anything beside it, and what the CSV says."""

import csv
import io
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bench.variants.page import markdown, page
from bench.variants.pictures import draw
from bench.variants.result import SweepResult, VariantResult
from bench.variants.tables import csv_text, tables
from tests.bench.variants.made import broken, gate, result, swept

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Reader(HTMLParser):
    """Checks that elements are closed in order; keeps what refers to elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.references += [value or "" for name, value in attrs if name.split(":")[-1] in {"href", "src"}]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)


@pytest.fixture
def results() -> list[VariantResult]:
    good = gate("reading", 0.95, 0.90, 0.97, 0.80)
    open_ = gate("sums", 0.85, 0.75, 0.92, 0.80)
    return [
        result("Q8_0", 2.0, good, gate("sums", 0.97, 0.9, 0.99, 0.8), bits=8.5),
        result("Q4_K_M", 1.0, good, open_, bits=4.5),
        broken("Q2_K", "the <disk> is full"),
    ]


@pytest.fixture
def sweep(results: list[VariantResult]) -> SweepResult:
    return swept(*results)


def test_the_page_stands_alone(sweep: SweepResult, results: list[VariantResult], tmp_path: Path) -> None:
    text = page(sweep, results, draw(sweep, results, tmp_path))
    assert "://" not in text, "nothing from elsewhere, no namespaces either"
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    assert reader.seen.count("svg") == 3 and reader.seen.count("table") == 2
    assert "script" not in reader.seen and "link" not in reader.seen and "img" not in reader.seen
    assert all(reference.startswith("#") for reference in reader.references)
    for said in ("Ship Q8_0", "undecided at this sample size", "Pareto front", "bits per weight"):
        assert said in text
    assert "the &lt;disk&gt; is full" in text and "<disk>" not in text and "a &lt;fast&gt; one" in text


def test_ids_of_different_pictures_do_not_collide(
    sweep: SweepResult, results: list[VariantResult], tmp_path: Path
) -> None:
    pictures = draw(sweep, results, tmp_path)
    ids = [
        {part.split('"')[0] for part in path.read_text().split('<clipPath id="')[1:]}
        for path in pictures.values()
    ]
    assert all(ids)
    assert len(set().union(*ids)) == sum(len(some) for some in ids)


def test_markdown_shows_tables_and_pictures(
    sweep: SweepResult, results: list[VariantResult], tmp_path: Path
) -> None:
    text = markdown(sweep, results, draw(sweep, results, tmp_path))
    assert "| Q4_K_M | 4.50 | 4.50 |" in text and "| Q2_K | - |" in text
    assert "![Latency by category](latency.svg)" in text and (tmp_path / "latency.svg").is_file()


def test_the_csv_has_a_line_a_variant(sweep: SweepResult, results: list[VariantResult]) -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(sweep, results))))
    assert [row["variant"] for row in rows] == ["Q8_0", "Q4_K_M", "Q2_K"]
    best, small, failed = rows
    assert float(best["short_official_seconds"]) == 2.0 and float(small["speed"]) == 2.0
    assert (best["recommended"], small["recommended"]) == ("1", "0")
    assert (small["sums_verdict"], small["sums_items"]) == ("undecided", "50")
    assert failed["error"] == "the <disk> is full" and failed["speed"] == ""


def test_the_terminal_tells_what_is_shipped(sweep: SweepResult, results: list[VariantResult]) -> None:
    standings, latency = (str(table) for table in tables(sweep, results))
    assert "pass, front, ship" in standings and "FAILED" in standings and "undecided, front" in standings
    assert "speed: mean of Q8_0 / median" in standings
    assert "2,000" in latency


def test_a_sweep_without_gates_or_successes_still_has_a_page(tmp_path: Path) -> None:
    failed = broken("Q2_K", "gone")
    sweep = swept(failed)
    text = page(sweep, [failed], draw(sweep, [failed], tmp_path))
    assert "No variant could be measured" in text and "<svg" not in text
    timed = result("Q8_0", 1.0)
    alone = swept(timed)
    assert set(draw(alone, [timed], tmp_path)) == {"Divergence against size", "Latency by category"}
