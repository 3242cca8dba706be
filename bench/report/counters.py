"""What our server's steps were and where their time went, and what became of drafts: its own counters."""

import pandas as pd

from bench.servers.counters import COUNTED, DRAFTS, STEPS
from bench.terminal import Cell, Table

ROWS = r", \d+ rows$"
"""Of a cell's name: how many rows its steps sampled, which the store tells apart and the table does not."""


def counter_tables(frame: pd.DataFrame) -> list[Table]:
    """A table of steps and one of drafts; those that have rows."""
    rows = frame[frame["workload"].isin(COUNTED)]
    rows = rows.assign(cell=rows["cell"].str.replace(ROWS, "", regex=True))
    made: list[Table] = []
    for workload, line_of, title, notes in (
        (STEPS, _step_line, "Steps of our server", STEP_NOTES),
        (DRAFTS, _draft_line, "Speculation of our server", ()),
    ):
        lines: list[dict[str, Cell]] = []
        groups = rows[rows["workload"] == workload].groupby(["subject", "cell"], sort=False)
        for (subject, cell), group in groups:
            sums = group.groupby("metric")["value"].sum()
            lines.append({"server, load": f"{subject}: {cell}", **line_of(sums)})
        made += [Table.of(lines, title=title, notes=notes)] if lines else []
    return made


STEP_NOTES = (
    "means of a step; device: in llama_decode and waiting for it; host: all else, while a GPU is idle",
    "overlapped: host work that goes on while a GPU computes",
)


def _step_line(sums: "pd.Series[float]") -> dict[str, Cell]:
    steps = float(sums["steps"])
    parts = {"device ms": "device_time", "host ms": "host_time", "overlapped ms": "overlapped_time"}
    return {
        "steps": round(steps),
        "tokens a step": float(sums["step_tokens"]) / steps,
        **{title: float(sums.get(name, 0.0)) / steps for title, name in parts.items()},
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
