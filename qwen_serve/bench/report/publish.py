"""The part of a store for a repository: summaries and charts without single requests."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qwen_serve.bench.analysis.statistics import LEAST_ROUNDS, compare_subjects
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.load.protocol import DISTINCT, OFFICIAL
from qwen_serve.bench.report.pictures import draw_pictures, latencies, loads
from qwen_serve.bench.report.sweep import VERB as SWEEP
from qwen_serve.bench.report.sweep import sweep_tables
from qwen_serve.bench.report.tables import own_reference, subjects_table
from qwen_serve.bench.store import Manifest, Results, write_atomically
from qwen_serve.bench.terminal import Table, show

BEGIN, END = "<!-- headline -->", "<!-- end -->"
PRIVATE: Any = {"host": {"system"}, "subjects": {"__all__": {"url", "log"}}}
"""Keys of a manifest that are not published, since they describe the machine."""


def publish_results(
    results: Results, folder: Path, *, reference: str | None = None, page: Path | None = None
) -> list[Path]:
    """Write README.md, summary.csv, runs.json and charts, and the headline table into ``page``. Returns the
    files.

    Raises BenchError if nothing was measured, the reference is unknown, or the page lacks a mark.
    """
    frame = results.frame
    subjects = list(dict.fromkeys(frame["subject"]))
    if not subjects:
        raise BenchError("nothing was measured in these runs")
    first = reference or own_reference(results)
    if first not in subjects:
        raise BenchError(f"--reference {first}: not measured; there are {', '.join(subjects)}")
    results = Results(in_order(frame, first), results.manifests)
    frame = results.frame
    folder.mkdir(parents=True, exist_ok=True)
    about = "; ".join(dict.fromkeys(model_and_card(one) for one in results.manifests.values()))
    pictures = draw_pictures(frame, folder, about=about)
    days = dict.fromkeys(f"{one.started:%Y-%m-%d}" for one in results.manifests.values())
    headline = headline_table(frame, first, f"{about}, {', '.join(days)}")
    tables = [headline] if headline.rows else []
    tables += sweep_tables(results)
    if any(one.verb != SWEEP for one in results.manifests.values()):
        tables.append(subjects_table(results, reference=first, title="Everything"))
    command = f"qwen-bench report STORE --publish {folder.name if folder.is_absolute() else folder}"
    command += f" --reference '{first}'" if reference is not None else ""
    parts = ["# Recorded results", f"Made from a store by `{command}`."]
    parts += [f"![{title}]({path.name})" for title, path in pictures.items()]
    parts += [table.markdown().strip() for table in tables]
    parts += [_run_in_words(manifest) for manifest in results.manifests.values()]
    written = [folder / "README.md", folder / "summary.csv", folder / "runs.json", *pictures.values()]
    write_atomically(written[0], "\n\n".join(parts) + "\n")
    write_atomically(written[1], summarize(frame).to_csv(index=False, float_format="%.6g"))
    runs = [one.model_dump(mode="json", exclude=PRIVATE) for one in results.manifests.values()]
    write_atomically(written[2], json.dumps(runs, indent=1) + "\n")
    if page is not None:
        write_atomically(page, with_headline(page, headline.markdown()))
        written.append(page)
    return written


def in_order(frame: pd.DataFrame, reference: str) -> pd.DataFrame:
    """The rows with the reference first, then its kind (subjects with the same name up to a comma), then
    other kinds."""
    kinds = list(dict.fromkeys(name.split(",")[0] for name in (reference, *frame["subject"])))
    names = sorted(
        dict.fromkeys((reference, *frame["subject"])), key=lambda name: kinds.index(name.split(",")[0])
    )
    place = {name: number for number, name in enumerate(names)}
    return (
        frame.assign(place=frame["subject"].map(place))
        .sort_values("place", kind="stable")
        .drop(columns="place")
    )


def headline_table(frame: pd.DataFrame, reference: str, about: str = "") -> Table:
    """A table with a row for each subject: mean latency by protocol, output tok/s by concurrency, and
    ratios."""
    latency, rates = latencies(frame), loads(frame)
    columns = {
        f"{protocol}, mean ms": (rows, "latency")
        for protocol in (OFFICIAL, DISTINCT)
        if len(rows := latency[latency["workload"] == protocol])
    }
    columns |= {
        f"{workload}, {level:g} at once, tok/s": (rows, "output_rate")
        for (workload, level), rows in rates.groupby(["workload", "level"])
    }
    lines = [
        {"server": subject, **{title: _cell(*of, subject, reference) for title, of in columns.items()}}
        for subject in dict.fromkeys(frame["subject"])
    ]
    notes = [
        f"In parentheses: the row's performance divided by that of {reference} (below 1 is worse), paired by "
        f"round, with its 95% interval. Without an interval: fewer than {LEAST_ROUNDS} rounds, or of "
        "different runs; such a ratio close to 1 shows no difference."
    ]
    known = [line for line in lines if any(list(line.values())[1:])]
    return Table.of(known, title=about, notes=notes)


def with_headline(page: Path, headline: str) -> str:
    """The page's text with `headline` between its marks. Raises BenchError if a mark is missing."""
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise BenchError(f"--page {page}: cannot be read: {error.strerror}") from error
    before, found, rest = text.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise BenchError(f"--page {page}: want a line {BEGIN} and, below it, a line {END}")
    return f"{before}{BEGIN}\n{headline}{END}{after}"


def summarize(frame: pd.DataFrame) -> pd.DataFrame:
    """Summary statistics, with a row for each run, subject, workload, cell and metric."""
    keys = ["run", "subject", "workload", "cell", "metric", "unit"]
    groups = frame.groupby(keys, sort=False)
    spread = groups["value"].quantile(np.array([0.1, 0.5, 0.9])).unstack()
    spread.columns = pd.Index(["p10", "p50", "p90"])
    counted = groups.agg(rounds=("round", "nunique"), values=("value", "size"))
    return counted.join(spread).reset_index()


def model_and_card(manifest: Manifest) -> str:
    """The model and the GPU, in words; "synthetic" is part of a synthetic model's name."""
    said = manifest.settings.get("model")
    models = [said] if said else [one.get("model") for one in manifest.subjects.values()]
    named = ", ".join(dict.fromkeys(str(name) for name in models if name))
    return " on ".join(filter(None, (named, manifest.card)))


def _cell(rows: pd.DataFrame, metric: str, subject: str, reference: str) -> str | None:
    """The mean of the cells' medians, and its ratio to the reference; None if a cell was not measured."""
    medians = rows[rows["subject"] == subject].groupby("cell")["value"].median()
    if len(medians) < rows["cell"].nunique():
        return None
    ratio = compare_subjects(rows, subject, reference, metric)
    if ratio is None:
        return show(float(medians.mean()))
    known = ratio.paired and ratio.low is not None
    return f"{show(float(medians.mean()))} ({ratio if known else f'{ratio.value:.2f}x'})"


def _run_in_words(manifest: Manifest) -> str:
    told = [f"- {manifest.run}: {manifest.card or 'no card'}, commit {manifest.commit or 'unknown'}"]
    told += [f"  `{' '.join(manifest.command)}`", *(f"  - {note}" for note in manifest.notes)]
    return "\n".join(told)
