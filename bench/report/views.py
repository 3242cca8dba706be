"""What is shown of a run, by its verb: tables and pictures."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.report.pictures import draw_pictures
from bench.report.publish import model_and_card
from bench.report.tables import subjects_table
from bench.store import Results, Run
from bench.terminal import Table

TABLES = {
    **dict.fromkeys(("latency", "throughput", "peers"), "bench.report.requests:request_tables"),
    "quality": "bench.report.quality:quality_tables",
    "perplexity": "bench.report.perplexity:perplexity_tables",
    "conformance": "bench.checks.conformance:conformance_tables",
    "draft-cost": "bench.report.drafts:draft_cost_tables",
    "kv-cache": "bench.report.kv_cache:kv_cache_tables",
    "soak": "bench.load.soak:soak_tables",
    "start": "bench.servers.start:start_tables",
    "sweep": "bench.report.sweep:sweep_tables",
}
"""By verb, where its tables are made: a function of `Results`. Without one, `subjects_table` has to do."""

PICTURES = {
    "quality": "bench.report.quality_pictures:quality_pictures",
    "perplexity": "bench.report.quality_pictures:perplexity_pictures",
    "sweep": "bench.report.sweep_pictures:sweep_pictures",
}
"""By verb, where pictures of its own are drawn: a function of `Results`, a folder and a file name's prefix
that returns files by title."""


def show(run: Run) -> None:
    """Print the tables of what a run has recorded so far."""
    for table in tables_of(run.results(), run.manifest.run):
        table.print()


def tables_of(results: Results, run: str) -> list[Table]:
    """A run's tables; none where nothing was measured."""
    one = results.only(run)
    if one.frame.empty:
        return []
    where = TABLES.get(one.manifests[run].verb)
    return [subjects_table(one)] if where is None else list(_find(where)(one))


def pictures_of(results: Results, run: str, folder: Path) -> dict[str, Path]:
    """A run's pictures, as SVG files by title."""
    one, prefix = results.only(run), f"{run}-"
    drawn = draw_pictures(one.frame, folder, about=model_and_card(one.manifests[run]), prefix=prefix)
    where = PICTURES.get(one.manifests[run].verb)
    return drawn if where is None or one.frame.empty else drawn | _find(where)(one, folder, prefix)


def _find(where: str) -> Callable[..., Any]:
    module, _, name = where.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found
