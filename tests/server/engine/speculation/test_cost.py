"""The measurement of what drafts cost runs, and says what it is asked for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from server.engine.speculation.cost import main

if TYPE_CHECKING:
    from pathlib import Path


def test_all_ways_back_and_the_head_are_measured(nano_f16: Path, tmp_path: Path) -> None:
    out = tmp_path / "cost.json"
    main([str(nano_f16), "--snapshots", "0,2", "--times", "2", "--out", str(out)])
    result = json.loads(out.read_text())
    assert list(result["by_snapshots"]) == ["0", "2"]
    without, few = result["by_snapshots"].values()
    assert "wrong_by_snapshot" not in without
    assert list(few["wrong_by_snapshot"]) == ["2", "3"]
    for found in (without, few):
        by_rows = [found[name] for name in ("verify", "wrong_by_holder", "wrong_by_copy")]
        assert all(list(spent) == ["2", "3", "5", "9"] for spent in by_rows)
        assert min(found["decode"], *(ms for spent in by_rows for ms in spent.values())) > 0
        assert len(found["first_steps"]) == 4
        assert min(found["first_steps"]) > 0
        assert min(found["copy"], found["put_back"]) > 0
    assert few["settle"] > 0
    assert result["head"]["draft"] > 0
