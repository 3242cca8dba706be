"""What our server's steps were and where their time went, and what became of drafts: its own counters."""

import pandas as pd

from bench.servers.counters import COUNTED, DRAFTS, ENGINE, STEPS
from bench.store import Results
from bench.terminal import Cell, Table

ROWS = r", \d+ rows$"
"""Of a cell's name: how many rows its steps sampled, which the store tells apart and the table does not."""


def without_counters(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows that are of requests."""
    return frame[~frame["workload"].isin(COUNTED)]


def step_tables(results: Results) -> list[Table]:
    """For each run a table of steps, one of drafts, one of what else was counted; those that have rows."""
    counters = results.frame[results.frame["workload"].isin(COUNTED)]
    made = [
        table(rows) for _, rows in counters.groupby("run", sort=False) for table in (_steps, _drafts, _engine)
    ]
    return [table for table in made if table is not None]


def _steps(frame: pd.DataFrame) -> Table | None:
    lines: list[list[Cell]] = []
    kinds = frame.assign(cell=frame["cell"].str.replace(ROWS, "", regex=True))
    for where, total in _sums(kinds, STEPS):
        steps = total["steps"]
        line: list[Cell] = [where, round(steps), total["step_tokens"] / steps]
        line += [total.get(part, 0.0) / steps for part in ("device_time", "host_time", "overlapped_time")]
        lines.append(line)
    header = ["server, load, kind", "steps", "tokens a step", "device ms"]
    header += ["host ms", "overlapped ms"]
    notes = [
        "means of a step; device: in llama_decode and waiting for it; host: all else, while a GPU is idle",
        "overlapped: host work that goes on while a GPU computes",
    ]
    return Table(header, lines, title="Steps of our server", notes=notes) if lines else None


def _drafts(frame: pd.DataFrame) -> Table | None:
    lines: list[list[Cell]] = []
    for where, total in _sums(frame, DRAFTS):
        drafted, accepted, drafts = (
            total.get(name, 0.0) for name in ("drafted_tokens", "accepted_tokens", "verifications")
        )
        line: list[Cell] = [where, round(drafts), round(drafted)]
        line += [f"{accepted / drafted:.0%}" if drafted else None, accepted / drafts if drafts else None]
        line += [round(total.get(name, 0.0)) for name in ("drafts_failed", "drafts_unready")]
        lines.append(line)
    header = ["server, load, drafter", "drafts", "drafted", "accepted", "accepted a draft"]
    header += ["failed", "unready"]
    return Table(header, lines, title="Speculation of our server") if lines else None


def _engine(frame: pd.DataFrame) -> Table | None:
    names = {"sampler_changes": "sampler changes", "prefix_failed_copies": "failed checkpoint copies"}
    lines: list[list[Cell]] = [
        [where, *(round(total.get(name, 0.0)) for name in names)] for where, total in _sums(frame, ENGINE)
    ]
    return Table(["server, load", *names.values()], lines, title="Also counted") if lines else None


def _sums(frame: pd.DataFrame, workload: str) -> list[tuple[str, dict[str, float]]]:
    """(subject and cell, sum over rounds by metric)."""
    rows = frame[frame["workload"] == workload]
    return [
        (f"{subject}: {cell}", {str(k): float(v) for k, v in group.groupby("metric")["value"].sum().items()})
        for (subject, cell), group in rows.groupby(["subject", "cell"], sort=False)
    ]
