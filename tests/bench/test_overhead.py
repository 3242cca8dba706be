"""The client's own lateness is measured against a server whose sending times are known."""

from pathlib import Path

import pytest

from bench import overhead
from bench.options import run


def test_overhead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "overhead.json"
    arguments = ["--levels", "1,8", "--tokens", "10", "--rate", "100", "--out", str(out)]
    assert run(overhead.parser(), overhead.overhead, arguments) == 0
    one, eight = overhead.OverheadResult.load(out).levels
    assert (one.pieces, eight.pieces) == (10, 80)
    for level in (one, eight):
        assert 0 < level.delay.p10 <= level.delay.p99, "no piece is stamped before it was sent"
        assert level.pieces_per_second <= 101 * level.concurrency, "no stream is faster than its server"
    assert "delay p50 ms" in capsys.readouterr().out
