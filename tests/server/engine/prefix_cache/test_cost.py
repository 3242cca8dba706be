"""The measurement of what holding states costs: its figures are there, and plausible ones."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from server.engine.prefix_cache import cost

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_it_measures_and_writes(
    nano_q4_k_m: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cost.json"
    small = ["--resident", "0,64,128", "--piece", "64", "--ubatch", "16", "--times", "1"]
    cost.main([str(nano_q4_k_m), *small, "--out", str(out)])
    result = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out) == result
    pool = result["one_pool"]
    assert [step["cells"] for step in pool["steps"]] == [0, 64, 128]
    assert all(value > 0 for step in pool["steps"][1:] for value in step.values())
    assert set(pool["shapes_ms"]) == {
        "decodes", "prompt 4", "decodes + prompt 4", "prompt 16", "decodes + prompt 16"
    }  # fmt: skip
    assert all(value > 0 for value in pool["checkpoint"].values())
    assert result["streams"]["cells_each"] == 128
