"""The client's own lateness is measured against a server whose sending times are known."""

from pathlib import Path

import pytest

from bench.cli import main
from bench.store import load


def test_overhead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--levels", "1,8", "--tokens", "10", "--rate", "100", "--out", str(tmp_path)]
    assert main(["overhead", *options]) == 0
    results = load([tmp_path])
    for cell, chunks in (("1 concurrent", 10), ("8 concurrent", 80)):
        delays = results.of(metric="delay", cell=cell)["value"]
        assert len(delays) == chunks
        assert delays.min() > 0, "no chunk is stamped before it was sent"
        (rate,) = results.of(metric="chunk_rate", cell=cell)["value"]
        assert rate <= 101 * chunks / 10, "no stream is faster than its server"
    assert "delay p50 ms" in capsys.readouterr().out
