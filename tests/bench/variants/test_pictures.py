"""The charts of a sweep: only those with data, and with titles and labels as text."""

from pathlib import Path

from qwen_serve.bench.report.sweep_pictures import sweep_pictures
from tests.bench.variants.made import Made, gate, swept

PASS = gate("reading", 0.95, 0.90, 0.97, 0.80)


def test_divergence_against_size(tmp_path: Path) -> None:
    variants = (Made("Q8_0", 200, [PASS], scatter=0.05, bits=8.5), Made("Q4_K_M", 100, [PASS], scatter=0.05))
    results = swept(tmp_path / "store", *variants, Made("Q2_K", 0, error="gone"))
    drawn = sweep_pictures(results, tmp_path / "pictures", "a-")
    assert {title: path.name for title, path in drawn.items()} == {
        "Divergence against size": "a-divergence.svg",
    }
    assert all(path.read_text(encoding="utf-8").rstrip().endswith("</svg>") for path in drawn.values())
    assert not list(tmp_path.rglob("*.part"))


def test_without_figures_there_is_no_picture(tmp_path: Path) -> None:
    failed = swept(tmp_path / "none", Made("Q2_K", 0, error="gone"))
    assert sweep_pictures(failed, tmp_path) == {}
    timed = swept(tmp_path / "timed", Made("Q8_0", 100))
    assert set(sweep_pictures(timed, tmp_path)) == {"Divergence against size"}


def test_items_lost_and_gained(tmp_path: Path) -> None:
    paired = gate("reading", 0.95, 0.90, 0.97, 0.80, 500, (30, 4))
    drawn = sweep_pictures(swept(tmp_path / "store", Made("Q2_K", 100, [paired])), tmp_path)
    text = drawn["Items lost and gained against full precision"].read_text(encoding="utf-8")
    assert text.rstrip().endswith("</svg>") and "p &lt; 0.001" in text
