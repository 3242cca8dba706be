"""A comparison of servers as tables: every ratio with its interval, against one of them."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

import pandas as pd

from bench.analysis.statistics import Ratio, percentiles, times_as_good
from bench.load.protocol import CATEGORIES
from bench.report.latency import cached_share, total
from bench.report.steps import step_tables, without_counters
from bench.servers.ceiling import SUBJECT as ALONE
from bench.servers.ceiling import WORKLOAD as CEILING
from bench.servers.ceiling import Ceiling
from bench.store import Manifest, Results
from bench.terminal import Cell, Table

LONGEST_NAME = 16
"""Of a reference that fits into a column's header."""


def show_peers(results: Results) -> None:
    """Print the tables of every run; nothing where nothing was measured."""
    for table in peers_tables(results):
        table.print()


def peers_tables(results: Results) -> list[Table]:
    """For each run a table of each workload, of llama.cpp alone, of our server's steps, of who took part."""
    made: list[Table] = []
    for run, rows in results.frame.groupby("run", sort=False):
        manifest = results.manifests[str(run)]
        requests = without_counters(rows[rows["workload"] != CEILING])
        ceiling = Ceiling.of(rows)
        for workload, group in requests.groupby("workload", sort=False):
            if (group["metric"] == "output_rate").any() or (group["metric"] == "ms_per_token").any():
                made.append(_cells(group, str(workload), manifest, ceiling))
            else:
                made.append(_categories(group, str(workload), manifest, ceiling))
        if ceiling is not None:
            made.append(_alone(ceiling))
        made += step_tables(Results(rows, results.manifests))
        made.append(_who(manifest))
    return made


def verdict(ratio: Ratio | None) -> str | None:
    """A ratio with its interval, and whether that leaves 1 out."""
    if ratio is None:
        return None
    apart = ratio.low is None or ratio.told_apart or ratio.low == ratio.high
    return str(ratio) if apart else f"{ratio} (not told apart)"


def headline(rows: pd.DataFrame) -> str:
    """The metric that decides a cell: the rate of a closed loop, the latency of an open one, whose rate is
    given."""
    names = set(rows["metric"])
    if "ms_per_token" in names:
        return "ms_per_token"
    closed = "output_rate" in names and not rows["cell"].str.endswith(" req/s").all()
    return "output_rate" if closed else "latency"


def engine_ms(ceiling: Ceiling | None, category: str) -> float | None:
    """How long llama.cpp alone takes for a category's request."""
    one = CATEGORIES[category]
    found = ceiling.batch(one.prompt_tokens, one.max_tokens, 1) if ceiling is not None else None
    return 1000 * found.seconds if found is not None else None


def engine_rate(
    ceiling: Ceiling | None, workload: str, level: int, settings: Mapping[str, Any]
) -> float | None:
    """Output tok/s of llama.cpp alone at a level of concurrency; None for conversations.

    With shared prefixes: each prefix read once, then rounds of full batches of questions, decoded as if they
    had no prefix before them, so it can not quite be reached.
    """
    if ceiling is None or workload == "chat":
        return None
    question, answer = int(settings["input_tokens"]), int(settings["output_tokens"])
    batch = ceiling.batch(question, answer, level)
    if batch is None or workload != "shared-prefix":
        return batch.output_rate if batch is not None else None
    rate = ceiling.prefill_rate(int(settings["prefix_tokens"]))
    if rate is None:
        return None
    waves = int(settings["waves"])
    requests = max(4, waves * level) if waves else int(settings["requests"])
    prefixes = min(int(settings["prefixes"]), requests) * int(settings["prefix_tokens"]) / rate
    return requests * answer / (prefixes + requests / level * batch.seconds)


def _categories(rows: pd.DataFrame, protocol: str, manifest: Manifest, ceiling: Ceiling | None) -> Table:
    """A line for each server: medians by category, and one ratio over all of them."""
    reference = manifest.settings["reference"]
    baseline: Mapping[str, float] = manifest.settings.get("baseline") or {}
    names = list(dict.fromkeys(rows["cell"]))
    found = percentiles(rows, "latency", "subject", "cell")
    first, each = (percentiles(rows, metric, "subject", "cell") for metric in ("ttft", "itl"))
    best = [engine_ms(ceiling, name) for name in names]
    lines: list[list[Cell]] = []
    for subject in dict.fromkeys(rows["subject"]):
        medians = [found[subject, name].p50 if (subject, name) in found else None for name in names]
        line: list[Cell] = [subject, *medians, verdict(times_as_good(rows, subject, reference, "latency"))]
        shares = [b / value for b, value in zip(best, medians, strict=True) if b is not None and value]
        line.append(f"{fmean(shares):.0%}" if shares and len(shares) == len(names) else None)
        mine = rows[rows["subject"] == subject]
        line += [_cached(mine), _same(mine), round(total(mine, "failed"))]
        if first:
            spread = [
                (one[subject, names[-1]].p50 if (subject, names[-1]) in one else None)
                for one in (first, each)
            ]
            line += spread
        if baseline:
            scores = [baseline[n] / ms for n, ms in zip(names, medians, strict=True) if ms and n in baseline]
            line.append(fmean(scores) if len(scores) == len(names) else None)
        lines.append(line)
    header = ["server", *(f"{name} ms" for name in names), _against(reference), "of the engine"]
    header += ["cached", "same answers", "failed"]
    header += [f"TTFT ms, {names[-1]}", "ITL ms"] if first else []
    header += ["score"] if baseline else []
    notes = [
        "medians; the ratio: times as fast over all categories, paired by round, with its 95% interval",
        "of the engine: llama.cpp's own time for such a request, by the server's",
    ]
    if baseline:
        notes.append(
            f"score: mean speed-up against {', '.join(f'{n} {ms:,.0f}' for n, ms in baseline.items())} ms"
        )
    title = f"Latency, {protocol}, {_model(manifest)}, one request at a time"
    return Table(header, lines, title=title, notes=notes)


def _cells(rows: pd.DataFrame, workload: str, manifest: Manifest, ceiling: Ceiling | None) -> Table:
    """A line for each part and server, and one over all parts."""
    reference = manifest.settings["reference"]
    metric = headline(rows)
    goodput = "goodput" in set(rows["metric"])
    names, subjects = (list(dict.fromkeys(rows[column])) for column in ("cell", "subject"))
    lines = [
        _line(rows, name, subject, manifest, workload, ceiling, goodput=goodput)
        for name in names
        for subject in subjects
        if ((rows["cell"] == name) & (rows["subject"] == subject)).any()
    ]
    if len(names) > 1 and len({headline(rows[rows["cell"] == name]) for name in names}) == 1:
        for subject in subjects:
            ratio = verdict(times_as_good(rows, subject, reference, metric))
            lines.append([f"all, {subject}", None, ratio, *[None] * (len(lines[0]) - 3)])
    what = "ms a token" if metric == "ms_per_token" else "output tok/s"
    header = [f"{'tasks' if metric == 'ms_per_token' else 'load'}, server", what, _against(reference)]
    header += ["of the engine", *(["goodput req/s"] if goodput else []), "latency p50 s", "p99"]
    header += ["TTFT p50 ms", "p99", "ITL p50 ms", "p99", "cached", "same answers", "failed"]
    settings = manifest.settings
    told = ""
    if "input_tokens" in settings:
        told = f", {settings['input_tokens']:,} tokens in, {settings['output_tokens']:,} out"
    notes = ["medians; the ratio: times as good, paired by round, with its 95% interval"]
    if any(headline(rows[rows["cell"] == name]) == "latency" for name in names):
        notes.append("at a request rate the ratio is of latencies: the rate is given")
    if goodput:
        notes.append(f"goodput: requests a second that keep {settings['goodput']}")
    wrong = rows[rows["metric"] == "spot_checks_failed"].groupby("subject")["value"].sum()
    notes += [f"{subject}: {count:.0f} spot checks FAILED" for subject, count in wrong.items() if count]
    return Table(header, lines, title=f"{workload}{told}, {_model(manifest)}", notes=notes)


def _line(
    rows: pd.DataFrame,
    cell: str,
    subject: str,
    manifest: Manifest,
    workload: str,
    ceiling: Ceiling | None,
    *,
    goodput: bool,
) -> list[Cell]:
    here = rows[rows["cell"] == cell]
    mine, metric = here[here["subject"] == subject], headline(here)
    shown = "output_rate" if metric == "latency" else metric
    value = _median(mine, shown)
    share: float | None = None
    if metric == "output_rate" and value is not None:
        level = int(cell.split()[0])
        best = engine_rate(ceiling, workload, level, manifest.settings)
        share = value / best if best else None
    line: list[Cell] = [f"{cell}, {subject}", value]
    line.append(verdict(times_as_good(here, subject, manifest.settings["reference"], metric)))
    line.append(f"{share:.0%}" if share is not None else None)
    line += [_median(mine, "goodput")] if goodput else []
    for name, scale in (("latency", 0.001), ("ttft", 1.0), ("itl", 1.0)):
        spread = percentiles(mine, name, "subject").get((subject,))
        line += [
            scale * at if spread else None for at in ((spread.p50, spread.p99) if spread else (0.0, 0.0))
        ]
    return [*line, _cached(mine), _same(mine), round(total(mine, "failed"))]


def _alone(ceiling: Ceiling) -> Table:
    """What the engine does without a server."""
    lines: list[list[Cell]] = [
        [
            f"{row.prompt_tokens:,} in, {row.output_tokens:,} out, {row.sequences} at once",
            1000 * row.prefill_seconds,
            1000 * row.decode_seconds,
            row.output_rate,
        ]
        for row in ceiling.batches
    ]
    return Table(
        ["shape", "prefill ms", "decode ms", "output tok/s"],
        lines,
        title="llama.cpp without a server (llama-batched-bench)",
    )


def _who(manifest: Manifest) -> Table:
    """Who took part, with which resources, how long its start took, and who dropped out."""
    lines: list[list[Cell]] = []
    for name, about in manifest.subjects.items():
        if name == ALONE:
            continue
        state = "FAILED" if "failed" in about else "ok"
        line: list[Cell] = [name, about.get("program"), about.get("slots"), about.get("context")]
        lines.append([*line, about.get("start_seconds"), state])
    header = ["server", "program", "slots", "context", "start s", "state"]
    return Table(header, lines, title="Servers", notes=manifest.notes)


def _median(rows: pd.DataFrame, metric: str) -> float | None:
    values = rows[rows["metric"] == metric]["value"]
    return float(values.median()) if len(values) else None


def _cached(rows: pd.DataFrame) -> str | None:
    share = cached_share(rows)
    return f"{share:.0%}" if share is not None else None


def _same(rows: pd.DataFrame) -> str | None:
    compared = total(rows, "compared_answers")
    return f"{total(rows, 'same_answers'):.0f}/{compared:.0f}" if compared else None


def _against(reference: str) -> str:
    return f"x {reference}" if len(reference) <= LONGEST_NAME else "x reference"


def _model(manifest: Manifest) -> str:
    return str(manifest.settings.get("gguf") or "the model")
