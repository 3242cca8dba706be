"""Types of the KV cache are compared with f16, in a table."""

import random
from pathlib import Path

import pytest

from models.nano.train.continuation import story
from qwen_serve.bench.cli import main
from qwen_serve.bench.engine.kv_cache import read_kv_type
from qwen_serve.bench.report.kv_cache import kv_cache_tables
from qwen_serve.bench.store import load


@pytest.mark.parametrize("text", ["f16", "q8_0/q4_0", "q4_0:plain", "q8_0/q4_0:plain"])
def test_a_type_is_called_what_it_was_asked_as(text: str) -> None:
    assert read_kv_type(text).name == text


@pytest.mark.parametrize("text", ["q3_k", "q8_0/x", "q8_0:turned", ""])
def test_a_type_that_there_is_not(text: str) -> None:
    with pytest.raises(ValueError, match="want TYPE or KEYS/VALUES"):
        read_kv_type(text)


def test_fewer_bits_diverge_more(nano_f16: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(0)
    text = tmp_path / "text.txt"
    text.write_text("\n".join(story(rng) for _ in range(8)), encoding="utf-8")
    options = ["--text", str(text), "--types", "q8_0,q8_0/q4_0,q4_0,q4_0:plain", "--context", "256"]
    sizes = ["--chunks", "2", "--passages", "2", "--times", "2", "--threads", "1"]
    assert (
        main(["engine", "kv-cache", str(nano_f16), *options, *sizes, "--out", str(tmp_path / "store")]) == 0
    )
    results = load([tmp_path / "store"])
    rows = results.frame

    def values(metric: str) -> list[float]:
        return rows[rows["metric"] == metric]["value"].tolist()

    # two attention layers with 2 heads of 64: 256 keys, 256 values; blocks of 32 with a scale of 2 bytes
    assert values("kv_bytes") == [1024, 544, 416, 288, 288]
    whole, q8, mixed, q4, plain = values("kld_mean")
    assert 0 == whole < q8 < mixed < q4 and plain not in (0, q4)
    retrieved = values("retrieved")
    assert all(50 < share <= 100 for share in retrieved)
    lost, gained = values("lost_items"), values("gained_items")
    for share, gone, new in zip(retrieved, lost, gained, strict=True):
        assert share == pytest.approx(retrieved[0] + 100 * (new - gone) / (2 * 127))
    assert rows[rows["metric"] == "step_time"]["value"].gt(0).all()
    (table,) = kv_cache_tables(results)
    assert [row[0] for row in table.rows] == ["f16", "q8_0", "q8_0/q4_0", "q4_0", "q4_0:plain"]
    assert "retrieved %" in capsys.readouterr().out


def test_a_text_that_is_too_short(nano_f16: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A word.")
    assert (
        main(["engine", "kv-cache", str(nano_f16), "--text", str(text), "--out", str(tmp_path / "store")])
        == 1
    )
    assert "--context 2048 wants one chunk" in capsys.readouterr().err
