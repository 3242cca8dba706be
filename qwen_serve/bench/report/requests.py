"""Tables of the requests of one or several servers: a row for each cell and server, one over all cells, and
qwen-serve's counters.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import pandas as pd

from qwen_serve.bench.analysis.statistics import times_as_good
from qwen_serve.bench.load.counters import COUNTED, counter_tables
from qwen_serve.bench.load.generator import is_miscounted
from qwen_serve.bench.load.protocol import (
    CATEGORIES,
    DISTINCT,
    REQUESTS,
    TOKENS,
    WARM_UPS,
    WEIGHTS,
    at_concurrency,
)
from qwen_serve.bench.store import Manifest, Results
from qwen_serve.bench.terminal import Cell, Table

LONGEST_NAME = 16
"""Maximum number of characters of a reference's name in a column's header."""
LATE_MS = 5.0
"""Lateness above which the client distorts the times of an open loop."""
STREAMED = {
    "ttft": ("TTFT", (50, 90, 99)),
    "itl": ("ITL", (50, 90, 99)),
    "longest_gap": ("longest gap", (99,)),
}
"""Percentiles in the table of streamed requests."""

Line = dict[str, Cell]


def request_tables(results: Results) -> list[Table]:
    """For each run and workload a table of requests, and one of TTFT and ITL for streamed answers; then
    qwen-serve's counters, and the peers of a comparison.
    """
    made: list[Table] = []
    for run, rows in results.frame.groupby("run", sort=False):
        manifest = results.manifests[str(run)]
        requests = rows[~rows["workload"].isin(COUNTED)]
        # each turn begins with another server: show them in the order of the command line
        named = {name: number for number, name in enumerate(manifest.subjects)}
        requests = requests.sort_values("subject", key=lambda names: names.map(named), kind="stable")
        for workload, group in requests.groupby("workload", sort=False):
            made.append(_requests(group, str(workload), manifest))
            if (group["metric"] == "ttft").any():
                made.append(_streamed(group, str(workload)))
        made += counter_tables(rows)
        made += [_who(manifest)] if "reference" in manifest.settings else []
    return made


def headline(rows: pd.DataFrame) -> str:
    """The main metric of a cell: a closed loop's rate, or an open loop's latency, since its rate is given."""
    names = set(rows["metric"])
    if "ms_per_token" in names:
        return "ms_per_token"
    closed = "output_rate" in names and not rows["cell"].str.endswith(" req/s").all()
    return "output_rate" if closed else "latency"


def _requests(rows: pd.DataFrame, workload: str, manifest: Manifest) -> Table:
    """A table with a row for each cell and server, and for each server one over all cells."""
    settings = manifest.settings
    subjects, cells = (list(dict.fromkeys(rows[column])) for column in ("subject", "cell"))
    single = CATEGORIES.keys() >= set(cells)
    baseline: Mapping[str, float] = (settings.get("baseline") or {}) if single else {}
    lines: list[Line] = []
    for cell, subject, group in _by_cell(rows):
        line = {"cell": cell, "server": subject, **_figures(group)}
        median = line["latency ms"]
        if cell in baseline and isinstance(median, float):
            line["speed-up"] = baseline[cell] / median
        line |= _compared(rows[rows["cell"] == cell], subject, settings)
        lines.append(line)
    alike = len({headline(rows[rows["cell"] == cell]) for cell in cells}) == 1
    if len(cells) > 1 and alike and (single or "reference" in settings):
        lines += [_all(lines, rows, subject, settings) for subject in subjects]
    models = dict.fromkeys(manifest.subjects.get(name, {}).get("model") for name in subjects)
    model = settings.get("gguf") or ", ".join(filter(None, models)) or "the model"
    who = f"{subjects[0]}, {model}" if len(subjects) == 1 else str(model)
    how = [settings.get("endpoint"), "one request at a time"] if single else [_lengths(settings)]
    title = ", ".join(filter(None, (workload, who, *how)))
    return Table.of(_who_is_who(lines), title=title, notes=_notes(rows, workload, manifest))


def _by_cell(rows: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """(cell, server, rows), with all servers of a cell together."""
    for cell in rows["cell"].unique():
        for subject, group in rows[rows["cell"] == cell].groupby("subject", sort=False):
            yield str(cell), str(subject), group


def _who_is_who(lines: Sequence[Line]) -> Sequence[Line]:
    """The lines, without the servers' names if there is only one server."""
    if len({line["server"] for line in lines}) > 1:
        return lines
    return [{name: cell for name, cell in line.items() if name != "server"} for line in lines]


def _figures(rows: pd.DataFrame) -> Line:
    """The columns of one server in one cell."""
    failed, latencies = round(total(rows, "failed")), (rows["metric"] == "latency").sum()
    line: Line = {"requests": failed + int(latencies) if latencies else None, "failed": failed}
    for title, metric in (
        ("output tok/s", "output_rate"),
        ("total tok/s", "total_rate"),
        ("req/s", "request_rate"),
        ("goodput req/s", "goodput"),
        ("ms a token", "ms_per_token"),
    ):
        line[title] = median_of(rows, metric)
    if (rows["metric"] == "good").any():
        line["within limits"] = f"{total(rows, 'good') / (failed + int(latencies)):.0%}"
    line["latency ms"] = median_of(rows, "latency")
    for percent in (10, 90, 99):
        line[f"p{percent}"] = percentile_of(rows, "latency", percent)
    cached, prompts = rows[rows["metric"] == "cached_tokens"]["value"], total(rows, "prompt_tokens")
    line["cached"] = f"{cached.sum() / prompts:.0%}" if len(cached) and prompts else None
    return line


def _streamed(rows: pd.DataFrame, workload: str) -> Table:
    lines: list[Line] = []
    for cell, subject, group in _by_cell(rows):
        line: Line = {"cell": cell, "server": subject, "prompt tokens": median_of(group, "prompt_tokens")}
        for metric, (title, percents) in STREAMED.items():
            for percent in percents:
                line[f"{title} p{percent}"] = percentile_of(group, metric, percent)
        lines.append(line)
    return Table.of(_who_is_who(lines), title=f"{workload}: streamed, milliseconds")


def _compared(rows: pd.DataFrame, subject: str, settings: Mapping[str, Any]) -> Line:
    """The columns of a comparison: the ratio, and the number of answers equal to the reference's."""
    if "reference" not in settings:
        return {}
    reference = settings["reference"]
    against = reference if len(reference) <= LONGEST_NAME else "reference"
    mine = rows[rows["subject"] == subject]
    compared = total(mine, "compared_answers")
    same = f"{total(mine, 'same_answers'):.0f}/{compared:.0f}" if compared else None
    ratio = times_as_good(rows, subject, reference, headline(rows))
    return {f"x {against}": ratio.verdict if ratio is not None else None, "same answers": same}


def _all(
    lines: Sequence[Line], rows: pd.DataFrame, subject: str, settings: Mapping[str, Any]
) -> dict[str, Cell]:
    """The line over all cells of a server, with equal weights: means of medians, and one ratio."""
    own = [line for line in lines if line["server"] == subject]
    line: Line = {"cell": "all", "server": subject}
    if CATEGORIES.keys() >= set(rows["cell"]):
        for name in ("latency ms", "speed-up"):
            values = [value for one in own if isinstance(value := one.get(name), float)]
            line[name] = fmean(values) if values and len(values) == rows["cell"].nunique() else None
    return {**line, **_compared(rows, subject, settings)}


def _lengths(settings: Mapping[str, Any]) -> str:
    if "input_tokens" not in settings:
        return ""
    varied = f" (+-{ratio:.0%})" if (ratio := settings.get("range_ratio")) else ""
    return f"{settings['input_tokens']:,} tokens in, {settings['output_tokens']:,} out{varied}"


def _notes(rows: pd.DataFrame, workload: str, manifest: Manifest) -> list[str]:
    settings, about = manifest.settings, manifest.subjects
    counted = dict.fromkeys(about.get(name, {}).get("counted_by") for name in rows["subject"].unique())
    notes = []
    if known := [str(name) for name in counted if name]:
        notes.append(f"output tokens counted by {', '.join(known)}")
    if "reference" in settings:
        notes.append(
            "the ratio: times as good, paired by round, [95% interval]; of latencies at a request rate"
        )
    if settings.get("baseline") and CATEGORIES.keys() >= set(rows["cell"]):
        told = ", ".join(f"{name} {ms:,.0f}" for name, ms in settings["baseline"].items())
        notes.append(f"speed-up: against {told} ms; only a ratio on one card compares software")
    if settings.get("goodput"):
        notes.append(f"goodput: requests a second that keep {settings['goodput']}")
    several = rows["subject"].nunique() > 1
    for cell, subject, group in _by_cell(rows):
        where = f"{workload} {cell}, {subject}" if several else f"{workload} {cell}"
        notes += [f"{where}: {text}" for text in _cell_notes(group, workload, cell, settings)]
    if workload == "random" and not several:
        value, deviations = hackathon_score(rows, settings)
        if value is not None and deviations:
            notes.append(f"weighted sum {value:,.0f}, not a score of the protocol: {'; '.join(deviations)}")
        elif value is not None:
            notes.append(f"score: {value:,.0f}")
        if (replicas := settings.get("predict_replicas")) and (by_one := predicted(rows, replicas)):
            notes.append(by_one)
    return notes + ([] if "reference" in settings else manifest.notes)


def _cell_notes(rows: pd.DataFrame, workload: str, cell: str, settings: Mapping[str, Any]) -> list[str]:
    """Notes about problems of a server's requests in a cell."""
    category = CATEGORIES.get(cell)
    notes: list[str] = []
    wanted = category.max_tokens if category is not None else settings.get("output_tokens", 0)
    early = int((rows[rows["metric"] == "claimed_tokens"]["value"] < wanted).sum())
    if early:
        notes.append(f"{early} answers stopped before {wanted} tokens")
    prompt = median_of(rows, "prompt_tokens")
    if category is not None and workload == DISTINCT and prompt not in (None, category.prompt_tokens):
        notes.append(f"the server counts {prompt:.0f} prompt tokens, not {category.prompt_tokens}")
    late = rows[rows["metric"] == "lateness"]["value"].quantile(0.99)
    if late > LATE_MS:
        notes.append(f"the client itself sent its last percent {late:.0f} ms late")
    if wrong := round(total(rows, "spot_checks_failed")):
        notes.append(f"{wrong} spot checks FAILED")
    if wrong := miscounted(rows):
        claimed, verified = (total(rows, name) for name in ("claimed_tokens", "verified_tokens"))
        notes.append(
            f"{wrong} answers re-count to other lengths than claimed ({claimed:,.0f} claimed, "
            f"{verified:,.0f} verified)"
        )
    if failed := total(rows, "failed"):
        notes.append(f"{failed:.0f} requests FAILED and are left out")
    return notes


def hackathon_score(rows: pd.DataFrame, settings: Mapping[str, Any]) -> tuple[float | None, list[str]]:
    """(score, notes): the hackathon's weighted sum of verified output tok/s over the levels with a weight, or
    None without such levels; and the run's deviations from its protocol.
    """
    cells = {level: rows[rows["cell"] == at_concurrency(level)] for level in WEIGHTS}
    known = {
        level: rate for level, group in cells.items() if (rate := median_of(group, "output_rate")) is not None
    }
    if not known:
        return None, []
    missing = [str(level) for level in WEIGHTS if level not in known]
    checks = rows[rows["metric"] == "spot_checks_failed"]["value"]
    tokens = settings["input_tokens"], settings["output_tokens"]
    deviations = {
        f"levels {', '.join(missing)} were not run": bool(missing),
        f"{tokens[0]:,} / {tokens[1]:,} tokens instead of 1,024 / 1,024": tokens != (TOKENS, TOKENS),
        "lengths vary (--range-ratio)": bool(settings.get("range_ratio")),
        f"{settings['requests']} requests a level instead of {REQUESTS}": settings["requests"] != REQUESTS,
        f"warm-ups other than {WARM_UPS} a level (--warmup {WARM_UPS})": settings["warmup"] != WARM_UPS,
        "requests failed": total(rows, "failed") > 0,
        "spot checks failed or were left out": not len(checks) or checks.sum() > 0,
        "re-counted tokens differ from the claimed ones": any(miscounted(one) for one in cells.values()),
    }
    value = sum(WEIGHTS[level] * rate for level, rate in known.items())
    return value, [why for why, holds in deviations.items() if holds]


def predicted(rows: pd.DataFrame, replicas: int) -> str | None:
    """A prediction for several replicas behind a router, from this server's levels; None if a level is
    missing.

    The router is assumed to distribute requests evenly.
    """
    rates: dict[int, float] = {}
    for level in WEIGHTS:
        busy = min(level, replicas)
        rate = median_of(rows[rows["cell"] == at_concurrency(level // busy)], "output_rate")
        if rate is None:
            return None
        rates[level] = busy * rate
    shown = ", ".join(f"{level}: {rate:,.0f}" for level, rate in rates.items())
    total = sum(WEIGHTS[level] * rate for level, rate in rates.items())
    return (
        f"{replicas} replicas behind a router, a prediction from this server's levels and not a measurement, "
        f"output tok/s at {shown}; weighted sum {total:,.0f}"
    )


def _who(manifest: Manifest) -> Table:
    """A table of the peers: resources, start time, and the reason if one dropped out."""
    lines: list[Line] = [
        {
            "server": name,
            **{key: about.get(key) for key in ("program", "slots", "context")},
            "start s": about.get("start_seconds"),
            "state": "FAILED" if "failed" in about else "ok",
        }
        for name, about in manifest.subjects.items()
    ]
    return Table.of(lines, title="Servers", notes=manifest.notes)


# --- statistics of rows
# --------------------------------------------------------------------------------------


def miscounted(rows: pd.DataFrame) -> int:
    """The number of requests whose reported token count differs from the tokenizer's."""
    claimed, recounted = (
        rows[rows["metric"] == name]["value"] for name in ("claimed_tokens", "recounted_tokens")
    )
    if not len(recounted):
        return 0
    return sum(is_miscounted(*counts) for counts in zip(claimed, recounted, strict=True))


def total(rows: pd.DataFrame, metric: str) -> float:
    return float(rows[rows["metric"] == metric]["value"].sum())


def percentile_of(rows: pd.DataFrame, metric: str, percent: float) -> float | None:
    """A percentile (``percent``, 0 to 100) of a metric; None if it was not measured."""
    values = rows[rows["metric"] == metric]["value"]
    return float(values.quantile(percent / 100)) if len(values) else None


def median_of(rows: pd.DataFrame, metric: str) -> float | None:
    """The median of a metric; None if it was not measured."""
    return percentile_of(rows, metric, 50)
