"""The tables and charts of a run, by its verb."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from qwen_serve.bench.report.pictures import draw_pictures
from qwen_serve.bench.report.publish import model_and_card
from qwen_serve.bench.report.tables import subjects_table
from qwen_serve.bench.store import Results, Run
from qwen_serve.bench.terminal import Table

TABLES = {
    **dict.fromkeys(("latency", "throughput", "peers"), "qwen_serve.bench.report.requests:request_tables"),
    "quality": "qwen_serve.bench.report.quality:quality_tables",
    "perplexity": "qwen_serve.bench.report.perplexity:perplexity_tables",
    "conformance": "qwen_serve.bench.checks.conformance:conformance_tables",
    "drafts": "qwen_serve.bench.report.drafts:draft_cost_tables",
    "kv-cache": "qwen_serve.bench.report.kv_cache:kv_cache_tables",
    "soak": "qwen_serve.bench.load.soak:soak_tables",
    "start": "qwen_serve.bench.servers.start:start_tables",
    "sweep": "qwen_serve.bench.report.sweep:sweep_tables",
    "tenants": "qwen_serve.bench.load.tenants:tenant_tables",
}
"""Verb -> function that makes tables from `Results`. The default is `subjects_table`."""

PICTURES = {
    "sweep": "qwen_serve.bench.report.sweep_pictures:sweep_pictures",
}
"""Verb -> function that draws further charts. It takes `Results`, a folder and a prefix of file names, and
returns files by title."""


def show(run: Run) -> None:
    """Print the tables of a run's rows so far."""
    for table in tables_of(run.results(), run.manifest.run):
        table.print()


def tables_of(results: Results, run: str) -> list[Table]:
    """A run's tables; none if nothing was measured."""
    one = results.only(run)
    if one.frame.empty:
        return []
    where = TABLES.get(one.manifests[run].verb)
    return [subjects_table(one)] if where is None else list(_find(where)(one))


def pictures_of(results: Results, run: str, folder: Path) -> dict[str, Path]:
    """A run's charts, as SVG files by title."""
    one, prefix = results.only(run), f"{run}-"
    drawn = draw_pictures(one.frame, folder, about=model_and_card(one.manifests[run]), prefix=prefix)
    where = PICTURES.get(one.manifests[run].verb)
    return drawn if where is None or one.frame.empty else drawn | _find(where)(one, folder, prefix)


def _find(where: str) -> Callable[..., Any]:
    module, _, name = where.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found
