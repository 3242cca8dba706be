"""Made-up runs, for tests of code that reads a store."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qwen_serve.bench.store import Run

Row = tuple[str, str, str, int, dict[str, float]]
"""subject, workload, cell, round, values by metric."""


def made_run(
    store: Path, rows: Iterable[Row], *, verb: str = "made", card: str | None = None, **settings: Any
) -> Path:
    """Make a finished run in ``store``. Returns its folder."""
    with Run.begin(store, verb, settings=settings, card=card, local=False) as run:
        for subject, workload, cell, round, values in rows:
            run.add(subject, workload, cell, round, values)
    return run.folder
