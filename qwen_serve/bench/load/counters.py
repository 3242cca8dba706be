"""Growth of qwen-serve's counters during a measurement: times of its steps, and counts of its drafts.

Only this module has the names on /metrics. The growth between two readings becomes rows of the store:

    workload "steps", cell "random, 8 concurrent, decode, 8 rows": steps, step_tokens, device and host time
    workload "drafts", cell "random, 8 concurrent, mtp": by drafter
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping

import pandas as pd
from prometheus_client.parser import text_string_to_metric_families

from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.load.client import Client
from qwen_serve.bench.store import Run
from qwen_serve.bench.terminal import Cell, Table

STEPS, DRAFTS = "steps", "drafts"
COUNTED = frozenset({STEPS, DRAFTS})
"""Workloads of the store whose rows are counters, not requests."""

STEP_COUNTERS = {"qwen_steps_total": "steps", "qwen_step_tokens_total": "step_tokens"}
STEP_SECONDS = "qwen_step_seconds_total"
PHASES = {
    "decode": "device_time",  # in llama_decode
    "wait": "device_time",  # waiting for what llama_decode started
    "propose": "draft_time",  # drafters, and their passes on the device
    "overlapped": "overlapped_time",
}
"""Phase of a step -> metric of its time. All other phases are host time."""

PARTS = {
    "draft": "draft_time",
    "device": "device_time",
    "host": "host_time",
    "overlapped": "overlapped_time",
}
"""Column in the tables -> metric of that part of a step's time."""

DRAFT_COUNTERS = {
    "qwen_draft_verifications_total": "verifications",
    "qwen_drafted_tokens_total": "drafted_tokens",
    "qwen_accepted_draft_tokens_total": "accepted_tokens",
    "qwen_drafts_failed_total": "drafts_failed",
    "qwen_drafts_unready_total": "drafts_unready",
}
RESIDENT_MEMORY = "process_resident_memory_bytes"

ROWS = r", \d+ rows$"
"""Matches the number of sampled rows in a cell's name. The table merges these cells."""

STEP_NOTES = (
    "means of a step; device: in llama_decode and waiting for it; draft: drafters with their passes; "
    "host: all else, while a GPU is idle",
    "overlapped: host work that goes on while a GPU computes",
)

Key = tuple[str, tuple[tuple[str, str], ...]]
Counters = Mapping[Key, float]
"""Values of counters, by name and sorted labels."""


async def read_counters(client: Client) -> Counters:
    """All counters on /metrics; empty if the server has no such page, or an unreadable one."""
    try:
        reply = await client.request("GET", "/metrics")
        return parse_counters(reply.text) if reply.status == 200 else {}
    except (BenchError, ValueError):
        return {}


def parse_counters(text: str) -> Counters:
    """Parse Prometheus' text format. Raises ValueError for other text."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def growth(before: Counters, after: Counters) -> Counters:
    """The growth of each counter; counters that did not grow are omitted."""
    grown = {key: value - before.get(key, 0.0) for key, value in after.items()}
    return {key: value for key, value in grown.items() if value}


def counted(grown: Counters, cell: str) -> Iterator[tuple[str, str, dict[str, float]]]:
    """(workload, cell, values) of the store's rows. ``cell``: the measured cell, which their names begin
    with."""
    steps: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    drafts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for (name, labelled), value in grown.items():
        labels = dict(labelled)
        if name in STEP_COUNTERS:
            steps[_kind(labels)][STEP_COUNTERS[name]] += value
        elif name == STEP_SECONDS:
            steps[_kind(labels)][PHASES.get(labels["phase"], "host_time")] += 1000 * value
        elif name in DRAFT_COUNTERS:
            drafts[labels["drafter"]][DRAFT_COUNTERS[name]] += value
    for kind, values in sorted(steps.items()):
        if values.get("steps"):
            yield STEPS, f"{cell}, {kind}", dict(values)
    for drafter, values in sorted(drafts.items()):
        yield DRAFTS, f"{cell}, {drafter}", dict(values)


def record_growth(
    run: Run, subject: str, workload: str, cell: str, round: int, before: Counters, after: Counters
) -> None:
    """Record the growth of the counters during a round; nothing for servers without counters."""
    if before and after:
        for kind, name, values in counted(growth(before, after), f"{workload}, {cell}"):
            run.add(subject, kind, name, round, values)


def _kind(labels: Mapping[str, str]) -> str:
    return f"{labels['kind']}, {labels['rows']} rows"


def counter_tables(frame: pd.DataFrame) -> list[Table]:
    """A table of steps and one of drafts, if they have rows."""
    rows = frame[frame["workload"].isin(COUNTED)]
    rows = rows.assign(cell=rows["cell"].str.replace(ROWS, "", regex=True))
    made: list[Table] = []
    for workload, line_of, title, notes in (
        (STEPS, _step_line, "Steps of our engine", STEP_NOTES),
        (DRAFTS, _draft_line, "Speculation of our engine", ()),
    ):
        lines: list[dict[str, Cell]] = []
        groups = rows[rows["workload"] == workload].groupby(["subject", "cell"], sort=False)
        for (subject, cell), group in groups:
            sums = group.groupby("metric")["value"].sum()
            lines.append({"server, load": f"{subject}: {cell}", **line_of(sums)})
        made += [Table.of(lines, title=title, notes=notes)] if lines else []
    return made


def _step_line(sums: "pd.Series[float]") -> dict[str, Cell]:
    steps = float(sums["steps"])
    return {
        "steps": round(steps),
        "tokens a step": float(sums["step_tokens"]) / steps,
        **{f"{part} ms": sums[name] / steps for part, name in PARTS.items() if name in sums},
    }


def _draft_line(sums: "pd.Series[float]") -> dict[str, Cell]:
    drafts, drafted, accepted = (
        float(sums.get(name, 0.0)) for name in ("verifications", "drafted_tokens", "accepted_tokens")
    )
    return {
        "drafts": round(drafts),
        "drafted": round(drafted),
        "accepted": f"{accepted / drafted:.0%}" if drafted else None,
        "accepted a draft": accepted / drafts if drafts else None,
        "failed": round(sums.get("drafts_failed", 0.0)),
        "unready": round(sums.get("drafts_unready", 0.0)),
    }
