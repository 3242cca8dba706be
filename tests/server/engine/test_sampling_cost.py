"""The measurement of ways to sample runs, and says what it is asked for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from server.engine.sampling_cost import main

if TYPE_CHECKING:
    from pathlib import Path


def test_every_way_is_measured(nano_f16: Path, tmp_path: Path) -> None:
    out = tmp_path / "cost.json"
    main([str(nano_f16), "--rows", "3,1", "--times", "1", "--out", str(out)])
    result = json.loads(out.read_text())
    assert result["model"] == nano_f16.name
    for name in ("raw_rows", "greedy_samplers_of_llama_cpp"):
        assert list(result[name]) == ["1", "3"]
    readouts = result["readouts"]
    assert readouts["refused"] == ""
    for name in ("best", "top_k", "guess", "row"):
        assert list(readouts[name]) == ["1", "3"]
        assert all(milliseconds > 0 for milliseconds in readouts[name].values())
    assert list(readouts["one_whole_row"]) == list(readouts["one_without_a_sampler"]) == ["3"]
