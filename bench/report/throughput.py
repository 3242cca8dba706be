"""Throughput runs as tables: one line a level of concurrency or request rate, and the hackathon's score."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from bench.analysis.statistics import percentiles
from bench.load.protocol import REQUESTS, TOKENS, WARM_UPS, WEIGHTS, at_concurrency
from bench.report.latency import cached_share, count_notes, miscounted, total
from bench.report.steps import step_tables, without_counters
from bench.store import Manifest, Results
from bench.terminal import Cell, Table

LATE_MS = 5.0
"""From which on the client itself distorts the times of an open loop."""


def show_throughput(results: Results) -> None:
    """Print the tables of every run, subject and workload; nothing where nothing was measured."""
    for table in throughput_tables(results):
        table.print()


def throughput_tables(results: Results) -> list[Table]:
    """For each run, subject and workload a table of its cells, and for conversations one by turn; then what
    our server counted."""
    made: list[Table] = []
    requests = without_counters(results.frame).groupby(["run", "subject", "workload"], sort=False)
    for (run, subject, workload), rows in requests:
        manifest = results.manifests[str(run)]
        about = manifest.subjects.get(str(subject), {})
        title = f"{subject} ({about.get('model') or 'its model'}), {workload}"
        made.append(_cells(rows, manifest, about, str(workload), title))
        if (rows[rows["metric"] == "turn"]["value"] > 1).any():
            made.append(_turns(rows, title))
    return made + step_tables(results)


def _cells(
    rows: pd.DataFrame, manifest: Manifest, about: Mapping[str, Any], workload: str, title: str
) -> Table:
    limits = manifest.settings.get("goodput")
    header = ["load", "requests", "failed", "output tok/s", "total tok/s", "req/s"]
    header += ["goodput req/s", "within limits"] if limits else []
    header += ["latency p50 s", "p90", "p99", "TTFT p50 ms", "p90", "p99", "ITL p50 ms", "p99", "cached"]
    spreads = {metric: percentiles(rows, metric, "cell") for metric in ("latency", "ttft", "itl")}
    lines: list[list[Cell]] = []
    notes = [f"output tokens counted by {about.get('counted_by')}"]
    if limits:
        notes.append(f"goodput: requests a second that keep {limits}")
    for name, group in rows.groupby("cell", sort=False):
        failed, good = int(total(group, "failed")), total(group, "good")
        requests = failed + int((group["metric"] == "latency").sum())
        line: list[Cell] = [str(name), requests, failed]
        line += [_median(group, metric) for metric in ("output_rate", "total_rate", "request_rate")]
        line += [_median(group, "goodput"), f"{good / requests:.0%}"] if limits else []
        for metric, wanted, scale in (
            ("latency", ("p50", "p90", "p99"), 0.001),
            ("ttft", ("p50", "p90", "p99"), 1.0),
            ("itl", ("p50", "p99"), 1.0),
        ):
            spread = spreads[metric].get((str(name),))
            line += [scale * getattr(spread, at) if spread is not None else None for at in wanted]
        share = cached_share(group)
        lines.append([*line, f"{share:.0%}" if share is not None else None])
        notes += _cell_notes(group, str(name), manifest)
    score = hackathon_score(rows, manifest.settings, recounted="recounted_tokens" in set(rows["metric"]))
    if workload == "random" and score is not None:
        notes.append(str(score))
    return Table(header, lines, title=f"Throughput of {title}", notes=[*notes, *manifest.notes])


def _turns(rows: pd.DataFrame, title: str) -> Table:
    """The requests' rows follow one another, so the turn that precedes a value is its request's."""
    requests = rows.copy()
    requests["turn"] = requests["value"].where(requests["metric"] == "turn")
    # of a request, latency and lateness are recorded before its turn
    ahead = requests["metric"].isin(["latency", "lateness"])
    requests["turn"] = requests["turn"].bfill().where(ahead, requests["turn"].ffill())
    lines: list[list[Cell]] = []
    for (name, turn), group in requests.groupby(["cell", "turn"], sort=False):
        share = cached_share(group)
        line: list[Cell] = [f"{name}, turn {turn:.0f}", _median(group, "prompt_tokens")]
        line.append(f"{share:.0%}" if share is not None else None)
        for metric, scale in (("ttft", 1.0), ("latency", 0.001)):
            values = group[group["metric"] == metric]["value"]
            line += [scale * float(values.quantile(at)) if len(values) else None for at in (0.5, 0.9, 0.99)]
        lines.append(line)
    header = ["load", "prompt tokens", "cached", "TTFT p50 ms", "p90", "p99", "latency p50 s", "p90", "p99"]
    return Table(header, lines, title=f"{title}: by turn of the conversation")


def _cell_notes(group: pd.DataFrame, where: str, manifest: Manifest) -> list[str]:
    wanted = manifest.settings["output_tokens"]
    early = int((group[group["metric"] == "claimed_tokens"]["value"] < wanted).sum())
    late = group[group["metric"] == "lateness"]["value"]
    notes = [f"{where}: {early} answers stopped before {wanted} tokens"] if early else []
    if len(late) and late.quantile(0.99) > LATE_MS:
        notes.append(f"{where}: the client itself sent its last percent {late.quantile(0.99):.0f} ms late")
    wrong = int(total(group, "spot_checks_failed"))
    notes += [f"{where}: {wrong} spot checks FAILED"] if wrong else []
    return notes + count_notes(group, where)


@dataclass(frozen=True, slots=True)
class Score:
    """The hackathon's weighted sum of verified output tok/s; ``deviations`` from its protocol, if any."""

    value: float
    deviations: tuple[str, ...]

    def __str__(self) -> str:
        if not self.deviations:
            return f"score: {self.value:,.0f}"
        return f"weighted sum {self.value:,.0f}, not a score of the protocol: {'; '.join(self.deviations)}"


def hackathon_score(rows: pd.DataFrame, settings: Mapping[str, Any], *, recounted: bool) -> Score | None:
    """Over the levels that have a weight; None when none has."""
    cells = {level: rows[rows["cell"] == at_concurrency(level)] for level in WEIGHTS}
    rates = {level: _median(group, "output_rate") for level, group in cells.items()}
    known = {level: rate for level, rate in rates.items() if rate is not None}
    if not known:
        return None
    missing = [str(level) for level in WEIGHTS if level not in known]
    checks = rows[rows["metric"] == "spot_checks_failed"]["value"]
    tokens = settings["input_tokens"], settings["output_tokens"]
    deviations = {
        f"levels {', '.join(missing)} were not run": bool(missing),
        f"{tokens[0]:,} / {tokens[1]:,} tokens instead of 1,024 / 1,024": tokens != (TOKENS, TOKENS),
        f"{settings['requests']} requests a level instead of {REQUESTS}": settings["requests"] != REQUESTS,
        f"warm-ups other than {WARM_UPS} a level (--warmup {WARM_UPS})": settings["warmup"] != WARM_UPS,
        "requests failed": total(rows, "failed") > 0,
        "spot checks failed or were left out": not len(checks) or checks.sum() > 0,
        "token counts are the server's own claims": not recounted,
        "re-counted tokens differ from the claimed ones": any(miscounted(one) for one in cells.values()),
    }
    value = sum(WEIGHTS[level] * rate for level, rate in known.items())
    return Score(value, tuple(why for why, holds in deviations.items() if holds))


def _median(group: pd.DataFrame, metric: str) -> float | None:
    values = group[group["metric"] == metric]["value"]
    return float(values.median()) if len(values) else None
