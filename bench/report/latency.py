"""Latency runs as tables: one line a category, both protocols side by side."""

from collections.abc import Mapping
from statistics import fmean

import pandas as pd

from bench.analysis.statistics import percentiles
from bench.load.generator import is_miscounted
from bench.load.protocol import CATEGORIES, DISTINCT, OFFICIAL
from bench.report.steps import step_tables, without_counters
from bench.store import Manifest, Results
from bench.terminal import Cell, Table

PROTOCOLS = (OFFICIAL, DISTINCT)


def show_latency(results: Results) -> None:
    """Print the tables of every run and subject; nothing where nothing was measured."""
    for table in latency_tables(results):
        table.print()


def latency_tables(results: Results) -> list[Table]:
    """For each run and subject a table of latencies and, where answers were streamed, one of TTFT and ITL;
    then what our server counted."""
    made: list[Table] = []
    for (run, subject), rows in without_counters(results.frame).groupby(["run", "subject"], sort=False):
        manifest = results.manifests[str(run)]
        about = manifest.subjects.get(str(subject), {})
        title = f"{subject} ({about.get('model') or 'its model'})"
        made.append(_latency(rows, manifest, about, title))
        if (rows["metric"] == "ttft").any():
            made.append(_streamed(rows, title))
    return made + step_tables(results)


def _latency(rows: pd.DataFrame, manifest: Manifest, about: Mapping[str, object], title: str) -> Table:
    baseline: Mapping[str, float] = manifest.settings.get("baseline") or {}
    found = percentiles(rows, "latency", "cell", "workload")
    lines: list[list[Cell]] = []
    for name in dict.fromkeys(rows["cell"]):
        category = CATEGORIES[name]
        line: list[Cell] = [name, f"{category.prompt_tokens:,} / {category.max_tokens}"]
        for protocol in PROTOCOLS:
            at = found.get((name, protocol))
            if at is None:
                line += [None] * 4
                continue
            speedup = baseline[name] / at.p50 if name in baseline else None
            share = cached_share(rows[(rows["cell"] == name) & (rows["workload"] == protocol)])
            spread = f"{_range(at.p10)} to {_range(at.p90)}"
            line += [at.p50, spread, speedup, f"{share:.0%}" if share is not None else None]
        lines.append(line)
    if len(lines) > 1:
        means: list[Cell] = []
        for column in (2, 6):
            means += [_mean(lines, column), None, _mean(lines, column + 2), None]
        lines.append(["mean", None, *means])
    header = ["category", "in / out"]
    for protocol in PROTOCOLS:
        header += [f"{protocol} ms", "p10 to p90", "speed-up", "cached"]
    return Table(
        header,
        lines,
        title=f"Latency of {title}, {manifest.settings.get('endpoint')}, one request at a time, medians",
        notes=_notes(rows, manifest, about),
    )


def _streamed(rows: pd.DataFrame, title: str) -> Table:
    header = ["category", "TTFT p50", "p90", "p99", "ITL p50", "p90", "p99", "longest gap p99"]
    ttft, itl, gap = (
        percentiles(rows, metric, "cell", "workload") for metric in ("ttft", "itl", "longest_gap")
    )
    lines: list[list[Cell]] = []
    for key, first in ttft.items():
        each, longest = itl.get(key), gap.get(key)
        line: list[Cell] = [", ".join(key), first.p50, first.p90, first.p99]
        line += [each.p50, each.p90, each.p99] if each is not None else [None] * 3
        lines.append([*line, longest.p99 if longest is not None else None])
    return Table(header, lines, title=f"Streamed by {title}, milliseconds")


def _notes(rows: pd.DataFrame, manifest: Manifest, about: Mapping[str, object]) -> list[str]:
    notes = [f"output tokens counted by {about.get('counted_by')}"]
    if manifest.settings.get("baseline"):
        told = ", ".join(f"{name} {ms:,.0f}" for name, ms in manifest.settings["baseline"].items())
        notes.append(f"speed-up: against {told} ms; only a ratio on one card compares software")
    for (name, protocol), group in rows.groupby(["cell", "workload"], sort=False):
        category, where = CATEGORIES[str(name)], f"{protocol} {name}"
        median = group.groupby("metric")["value"].median()
        if median.get("claimed_tokens", category.max_tokens) < category.max_tokens:
            notes.append(
                f"{where}: stopped early, {median['claimed_tokens']:.0f} of {category.max_tokens} tokens"
            )
        prompt = median.get("prompt_tokens", category.prompt_tokens)
        if protocol == DISTINCT and prompt != category.prompt_tokens:
            notes.append(
                f"{where}: the server counts {prompt:.0f} prompt tokens, not {category.prompt_tokens}"
            )
        notes += count_notes(group, where)
    return notes + manifest.notes


def count_notes(group: pd.DataFrame, where: str) -> list[str]:
    """What is wrong with the requests of a cell: failures, and token counts that do not re-count."""
    notes: list[str] = []
    wrong = miscounted(group)
    if wrong:
        claimed, verified = (total(group, name) for name in ("claimed_tokens", "verified_tokens"))
        notes.append(
            f"{where}: {wrong} answers re-count to other lengths than claimed ({claimed:,.0f} claimed, "
            f"{verified:,.0f} verified)"
        )
    failed = total(group, "failed")
    if failed:
        notes.append(f"{where}: {failed:.0f} requests FAILED and are left out")
    return notes


def miscounted(group: pd.DataFrame) -> int:
    """How many requests claim another number of tokens than the tokenizer finds."""
    counts = [group[group["metric"] == name]["value"] for name in ("claimed_tokens", "recounted_tokens")]
    if not len(counts[1]):
        return 0
    return sum(is_miscounted(claimed, recounted) for claimed, recounted in zip(*counts, strict=True))


def cached_share(group: pd.DataFrame) -> float | None:
    """Of the prompt tokens, those that came from a cache; None where the server does not say."""
    prompt, cached = total(group, "prompt_tokens"), group[group["metric"] == "cached_tokens"]["value"]
    return float(cached.sum()) / prompt if prompt and len(cached) else None


def total(group: pd.DataFrame, metric: str) -> float:
    """The sum of a metric."""
    return float(group[group["metric"] == metric]["value"].sum())


def _mean(lines: list[list[Cell]], column: int) -> float | None:
    values = [line[column] for line in lines]
    known = [float(value) for value in values if isinstance(value, float)]
    return fmean(known) if len(known) == len(lines) else None


def _range(ms: float) -> str:
    return f"{ms:,.3g}" if ms < 100 else f"{ms:,.0f}"
