"""The engine's operations are timed, and each timing is a row of the store."""

from pathlib import Path

import pytest

from bench.cli import main
from bench.engine.sampling import DRAWS
from bench.store import Results, load


def cells(results: Results, metric: str) -> dict[str, int]:
    rows = results.of(metric=metric)
    assert (rows["value"] > 0).all()
    return {str(cell): len(group) for cell, group in rows.groupby("cell")}


def test_sampling(nano_f32: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["sampling-cost", str(nano_f32), "--rows", "1,2", "--times", "2", "--out", str(tmp_path)]) == 0
    )
    results = load([tmp_path])
    found, drawn = cells(results, "step_time"), cells(results, "sample_time")
    for way in ("whole rows, argmax on the host", "device sampler BEST", "llama.cpp's greedy sampler"):
        assert found[f"{way}, 1 rows"] == found[f"{way}, 2 rows"] == 2
    for draw in DRAWS:
        assert drawn[f"{draw}, 1 rows"] == drawn[f"{draw}, 2 rows"] == 2
    assert found["first step after a change of device sampler, 2 rows"] == 1
    assert "median" in capsys.readouterr().out


def test_prefix_cache(nano_f32: Path, tmp_path: Path) -> None:
    options = ["--resident", "64,128", "--piece", "64", "--ubatch", "64", "--times", "2"]
    assert main(["prefix-cost", str(nano_f32), *options, "--out", str(tmp_path)]) == 0
    results = load([tmp_path])
    steps, copies = cells(results, "step_time"), cells(results, "copy_time")
    assert all(steps[f"1 sequence beside {resident} cells"] == 2 for resident in (0, 64, 128))
    assert copies == {
        "share 64 tokens": 3,
        "remove 64 tokens": 3,
        "save 64 tokens": 3,
        "restore 64 tokens": 2,
    }


def test_a_file_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    for name, message in (("no.gguf", "no.gguf: no such file"), ("x.gguf", "error: ")):
        assert main(["sampling-cost", str(tmp_path / name), "--out", str(tmp_path / "store")]) == 1
        assert message in capsys.readouterr().err


def test_grammar(nano_f32: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--sequences", "1,2", "--tokens", "8", "--times", "2"]
    assert main(["grammar-cost", str(nano_f32), *options, "--out", str(tmp_path)]) == 0
    results = load([tmp_path])
    found = cells(results, "step_time")
    ways = ("free", "a text", "nested lists")
    assert all(found[f"{n} answers, greedy, {way}"] == 2 for n in (1, 2) for way in ways)
    assert "times as long as free" in capsys.readouterr().out
