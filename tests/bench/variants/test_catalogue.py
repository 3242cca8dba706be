"""The catalogue has predictions from the variants' files, and only scores that were recorded with these
files."""

from pathlib import Path
from typing import Any

import pytest

from qwen_serve.bench.analysis.cards import CARDS
from qwen_serve.bench.analysis.geometry import Geometry
from qwen_serve.bench.cli import main
from qwen_serve.bench.report.publish import publish_results
from qwen_serve.bench.store import Results, Run, load
from qwen_serve.bench.variants.catalogue import (
    catalogue,
    predicted,
    read_recorded,
    recorded_gates,
    tensors_of,
)
from qwen_serve.server.variant import Variant
from tests.bench.variants.made import gate

PAGE = Path(__file__).parents[3] / "docs" / "variants.md"


def test_the_page_is_what_the_command_makes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "variants.md"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition("<!-- headline -->")
    page.write_text(f"{before}<!-- headline -->\n<!-- end -->{rest.partition('<!-- end -->')[2]}")
    assert main(["sweep", "variants", "--page", str(page)]) == 0
    assert page.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8"), (
        "made again by qwen-bench sweep variants --page docs/variants.md"
    )
    assert "predicted" in capsys.readouterr().out


def swept(store: Path, source: str, **subjects: tuple[str, dict[str, Any], float]) -> Results:
    """A sweep, from each subject's quant, settings and score at one gate."""
    settings = {"source": source, "variants": list(subjects)}
    with Run.begin(store, "sweep", settings=settings, local=False) as run:
        for name, (quant, served, score) in subjects.items():
            run.describe(name, quant=quant, settings=served, stages={"gates": 1.0})
            values = gate("nano_reasoning", score, score, score, 0.7).values()
            run.add(name, "gates", "nano_reasoning", 1, values)
    return load([run.folder])


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return swept(
        tmp_path,
        "models/nano",
        fast=("Q8_0", {}, 0.5),  # another quant under that name
        plain=("Q4_K_M", {"threads": 1}, 0.75),
        kv8=("Q4_K_M", {"cache_type_k": "q8_0"}, 0.875),
    )


def scored(variant: Variant, results: Results) -> list[float]:
    return [found.score for found in recorded_gates(variant, [results])]


def test_scores_are_those_of_the_very_weights_and_settings(results: Results) -> None:
    assert scored(Variant(name="fast", quant="Q4_K_M"), results) == [0.75], "threads change no answer"
    assert scored(Variant(name="a", quant="Q4_K_M", settings={"cache_type_k": "q8_0"}), results) == [0.875]
    assert scored(Variant(name="plain", quant="Q4_K_M", settings={"parallel": 1}), results) == []
    assert scored(Variant(name="plain", quant="Q5_K_M"), results) == []


def test_gates_that_were_cut_short_do_not_count(results: Results) -> None:
    (manifest,) = results.manifests.values()
    manifest.subjects["plain"]["stages"] = {}
    assert scored(Variant(name="plain", quant="Q4_K_M"), results) == []


def test_scores_of_another_model_are_left_out(tmp_path: Path) -> None:
    results = swept(tmp_path, "models/other", plain=("Q4_K_M", {}, 0.75))
    assert scored(Variant(name="plain", quant="Q4_K_M"), results) == []


def test_a_published_record_says_what_the_store_says(results: Results, tmp_path: Path) -> None:
    publish_results(results, tmp_path / "published")
    assert "which variant to ship" in (tmp_path / "published" / "README.md").read_text(encoding="utf-8")
    again = read_recorded(tmp_path / "published")
    for settings in ({}, {"cache_type_k": "q8_0"}):
        variant = Variant(name="any", quant="Q4_K_M", settings=settings)
        assert recorded_gates(variant, [again]) == recorded_gates(variant, [results])


def test_what_is_not_measured_is_not_there(results: Results) -> None:
    few = [Variant(name="one", quant="Q4_K_M"), Variant(name="other", quant="F16")]
    table = catalogue(few, CARDS["A10G"], [results])
    rows = {str(row[0]): dict(zip(table.header, row, strict=True)) for row in table.rows}
    assert rows["one"]["reasoning %"] == "75.0"
    assert (rows["one"]["gates"], rows["one"]["items"]) == ("pass", 50)
    assert (rows["other"]["reasoning %"], rows["other"]["gates"]) == (None, None)
    assert [row[0] for row in table.rows] == ["one", "other"], "the least predicted latency first"
    nothing = catalogue(few, CARDS["A10G"], [])
    assert "gates" not in nothing.header
    assert nothing.notes[-1] == "Gates: none was recorded with these weights and settings."


def test_predictions_are_the_rooflines(tmp_path: Path) -> None:
    """A step's time is its bytes over the GPU's bandwidth, if only weights and states are read."""
    variant = Variant(name="f", quant="F16")
    geometry = Geometry(tensors_of(variant))
    times = predicted(geometry, CARDS["A10G"])
    step = geometry.decode(128).n_bytes / CARDS["A10G"].bandwidth
    assert times["short"] == pytest.approx(128_000 * step, rel=0.01)
