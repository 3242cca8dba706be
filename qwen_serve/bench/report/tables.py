"""The default table of a run: each workload and cell by subject, with ratios to the reference."""

from collections.abc import Sequence

import pandas as pd

from qwen_serve.bench.analysis.statistics import by_round, compare_subjects, percentiles
from qwen_serve.bench.metrics import METRICS
from qwen_serve.bench.store import Results
from qwen_serve.bench.terminal import Cell, Table, show

RARE = {"failed", "spot_checks_failed", "good"}
"""Metrics that are shown only if they differ from the ideal value."""


def subjects_table(
    results: Results, metrics: Sequence[str] | None = None, *, reference: str | None = None, title: str = ""
) -> Table:
    """A table with a row for each workload, cell, metric and subject, and rows over all cells if there are
    several.

    ``metrics``: those to show, in order (default: all with a better direction). ``reference``: a subject
    (default: `own_reference`).
    """
    frame = results.frame
    subjects = list(dict.fromkeys(frame["subject"]))
    first = reference if reference is not None and reference in subjects else own_reference(results)
    lines: list[list[Cell]] = []
    for workload, rows in frame.groupby("workload", sort=False):
        cells = list(dict.fromkeys(rows["cell"]))
        for metric in metrics or compared_metrics(rows):
            for cell in cells:
                where = f"{workload}, {cell}"
                lines += _lines(rows[rows["cell"] == cell], metric, where, subjects, first)
            if len(cells) > 1 and len(subjects) > 1:
                lines += _lines(rows, metric, f"{workload}, all of them", subjects, first, spread=False)
    header = ["workload, cell", "metric", "subject", "median", "p10 to p90", "rounds"]
    header += [f"times as good as {first}"] if len(subjects) > 1 else []
    width = len(header)
    return Table(header, [line[:width] for line in lines], title=title or _title(results))


def own_reference(results: Results) -> str:
    """The first run's reference, else its first subject; "" without subjects."""
    subjects = list(dict.fromkeys(results.frame["subject"]))
    for run, manifest in results.manifests.items():
        named = manifest.settings.get("reference")
        for name in (named, f"{run}: {named}"):  # the name if other runs have the subject, too
            if name in subjects:
                return str(name)
    return next(iter(subjects), "")


def compared_metrics(frame: pd.DataFrame) -> list[str]:
    """The recorded metrics that have a better direction, in the order of `METRICS`."""
    found = set(frame["metric"])
    unusual = {
        name for name in RARE & found if frame[frame["metric"] == name]["value"].sum() > 0 and name != "good"
    }
    return [
        name
        for name, metric in METRICS.items()
        if name in found and metric.better is not None and (name not in RARE or name in unusual)
    ]


def _lines(
    rows: pd.DataFrame,
    metric: str,
    where: str,
    subjects: Sequence[str],
    reference: str,
    *,
    spread: bool = True,
) -> list[list[Cell]]:
    spreads = percentiles(rows, metric, "subject")
    rounds = by_round(rows, metric)
    lines: list[list[Cell]] = []
    for subject in subjects:
        found = spreads.get((subject,))
        if found is None:
            continue
        counted = rounds.xs(subject, level="subject").groupby(["run", "round"]).ngroups
        ratio = compare_subjects(rows, subject, reference, metric)
        if not spread and ratio is None:
            continue
        line: list[Cell] = [where, f"{METRICS[metric].title}, {METRICS[metric].unit}", subject]
        if lines:
            line[:2] = ["", ""]
        line += [found.p50, f"{show(found.p10)} to {show(found.p90)}"] if spread else [None, None]
        lines.append([*line, counted, ratio.verdict if ratio is not None else None])
    return lines


def _title(results: Results) -> str:
    told = [f"{one.verb}, {one.started:%Y-%m-%d %H:%M}" for one in results.manifests.values()]
    cards = list(dict.fromkeys(one.card or "no card" for one in results.manifests.values()))
    return f"{'; '.join(told)}: {' and '.join(cards)}"
