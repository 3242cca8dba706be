"""Tables of `qwen-bench engine drafts`."""

import re
from collections.abc import Iterator

import pandas as pd

from qwen_serve.bench.analysis.statistics import times_as_good
from qwen_serve.bench.load.counters import DRAFTS, PARTS, STEPS, counter_tables
from qwen_serve.bench.report.requests import median_of
from qwen_serve.bench.store import Results
from qwen_serve.bench.terminal import Cell, Table

WORKLOAD = "draft cost"
"""The store's workload, with a subject for each drafter and a cell for each prompt length and concurrency."""

OFF = "off"

TIMES = (
    "medians of requests; x off: times as good as without drafts, paired by round, [95% interval]",
    "ms a token: from the first one to the last, by the tokens after the first",
)
SHARES = (
    "steps that decode; tokens: that answers gained; rows: tokens in a batch, with drafts and what "
    "a rejected one has computed again",
    "draft: making drafts, the drafters' passes among it; device: the verification or plain step, in "
    "llama_decode and waiting for it",
    "host: all else, while a GPU is idle; overlapped: host work that goes on while a GPU computes",
)


def draft_cost_tables(results: Results) -> list[Table]:
    """Tables for each run: times with ratios, parts of steps, and counts of drafts."""
    made: list[Table] = []
    for run, rows in results.frame.groupby("run", sort=False):
        manifest = results.manifests[str(run)]
        ways = {name: number for number, name in enumerate(manifest.subjects)}
        model, after_first = manifest.settings["gguf"], manifest.settings["output_tokens"] - 1
        times: list[dict[str, Cell]] = []
        shares: list[dict[str, Cell]] = []
        for cell, way, requests in _by_cell(rows, list(ways)):
            where: dict[str, Cell] = {"cell": cell, "speculation": way}
            times.append({**where, **_times(rows, cell, way)})
            shares.append({**where, **_shares(rows, cell, way, tokens=requests * after_first)})
        title = f"{model}: ways to draft, {after_first + 1} tokens out"
        made.append(Table.of(times, title=title, notes=[*TIMES, *manifest.notes]))
        made.append(Table.of(shares, title="what steps are made of", notes=SHARES))
        drafts = rows[rows["workload"] == DRAFTS]  # each turn begins with another drafter
        made += counter_tables(
            drafts.sort_values("subject", key=lambda names: names.map(ways), kind="stable")
        )
    return made


def _by_cell(rows: pd.DataFrame, ways: list[str]) -> Iterator[tuple[str, str, int]]:
    """(cell, drafter, number of requests), with the drafters in the order of the command line."""
    answered = rows[(rows["workload"] == WORKLOAD) & (rows["metric"] == "itl")]
    counts = answered.groupby(["cell", "subject"], sort=False).size()
    for cell in answered["cell"].unique():
        for way in ways:
            if (cell, way) in counts.index:
                yield str(cell), way, int(counts[cell, way])


def _times(rows: pd.DataFrame, cell: str, way: str) -> dict[str, Cell]:
    of_cell = rows[(rows["workload"] == WORKLOAD) & (rows["cell"] == cell)]
    line: dict[str, Cell] = {}
    for title, metric in (("TTFT", "ttft"), ("token", "itl")):
        line[f"{title} ms"] = median_of(of_cell[of_cell["subject"] == way], metric)
        ratio = times_as_good(of_cell, way, OFF, metric) if way != OFF else None
        line[f"{title}, x off"] = ratio.verdict if ratio is not None else None
    return line


def _shares(rows: pd.DataFrame, cell: str, way: str, tokens: int) -> dict[str, Cell]:
    """Shares of a step's time, over all steps except those that read prompts."""
    ours = rows[(rows["workload"] == STEPS) & (rows["subject"] == way)]
    decoding = ours["cell"].str.match(re.escape(f"{WORKLOAD}, {cell}, ") + "(decode|verify), ")
    sums = ours[decoding].groupby("metric")["value"].sum()
    if sums.empty:  # an interrupted run
        return {}
    steps, parts = sums["steps"], {part: sums.get(name, 0.0) for part, name in PARTS.items()}
    spent = sum(parts.values())
    return {
        "tokens a step": tokens / steps,
        "rows a step": sums["step_tokens"] / steps,
        "ms a step": spent / steps,
        **{part: f"{value / spent:.0%}" for part, value in parts.items()},
    }
