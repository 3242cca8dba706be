"""Pictures of quality and perplexity runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from qwen_serve.bench.gates.score import WORKLOAD as GATES
from qwen_serve.bench.gates.score import gate_scores
from qwen_serve.bench.report.perplexity import HISTOGRAM, WORKLOAD
from qwen_serve.bench.report.plot import PALETTE, VERDICTS, figure
from qwen_serve.bench.store import Results

if TYPE_CHECKING:
    from qwen_serve.bench.gates.score import GateScore


def quality_pictures(results: Results, folder: Path, prefix: str = "") -> dict[str, Path]:
    """The gates of every subject: title -> SVG file."""
    made: dict[str, Path] = {}
    asked = results.of(workload=GATES).groupby(["run", "subject"], sort=False)
    for number, ((_, subject), rows) in enumerate(asked, 1):
        path = folder / f"{prefix}gates-{number}.svg"
        made[f"Quality gates: {subject}"] = draw_gates(gate_scores(rows), path)
    return made


def perplexity_pictures(results: Results, folder: Path, prefix: str = "") -> dict[str, Path]:
    """The KL divergence of every file, token by token: title -> SVG file."""
    made: dict[str, Path] = {}
    counted = results.of(workload=HISTOGRAM)
    for (run, subject), bars in counted.groupby(["run", "subject"], sort=False):
        figures = results.of(run=str(run), subject=str(subject), workload=WORKLOAD)
        values = dict(zip(figures["metric"], figures["value"], strict=True))
        reference = results.manifests[str(run)].subjects.get(str(subject), {}).get("reference")
        path = folder / f"{prefix}divergence-{len(made) + 1}.svg"
        made[f"KL divergence of {subject} from {reference}"] = draw_histogram(bars, values, path)
    return made


def draw_gates(scores: "Sequence[GateScore]", path: Path) -> Path:
    """Each gate's score with its interval, its threshold and its baseline. BenchError as `figure`."""
    with figure(path, height=1.4 + 0.7 * len(scores)) as (axis,):
        for place, gate in enumerate(scores):
            low = gate.score if gate.low is None else gate.low
            high = gate.score if gate.high is None else gate.high
            axis.errorbar(
                100 * gate.score,
                place,
                xerr=[[100 * (gate.score - low)], [100 * (high - gate.score)]],
                fmt="o",
                capsize=4,
                color=VERDICTS[gate.verdict],
            )
            for value, style in ((gate.threshold, "solid"), (gate.baseline, "dotted")):
                if value is not None:
                    axis.vlines(100 * value, place - 0.35, place + 0.35, color="black", linestyle=style)
        axis.set_yticks(
            range(len(scores)),
            [f"{gate.gate}\n{gate.verdict or 'no threshold'}, n = {gate.items:,}" for gate in scores],
        )
        axis.set_ylim(len(scores) - 0.5, -0.5)
        axis.set_xlabel("score, % (bar: 95% interval, line: threshold, dotted: baseline)")
    return path


def draw_histogram(bars: pd.DataFrame, values: Mapping[str, float], path: Path) -> Path:
    """Two panels: how many tokens lie how far from the reference, and the share that lies further."""
    bounds = bars["cell"].str.extract(r"^(\S+) to (\S+) nats$").astype("float64")
    (nearest, *counts), edges = bars["value"].tolist(), bounds[1].tolist()  # those near 0 have no place
    marks = (("median", "kld_median", "-"), ("mean", "kld_mean", "--"), ("99%", "kld_p99", ":"))
    with figure(path, columns=2, width=11, height=4) as (left, right):
        left.stairs(counts, edges, fill=True, color=PALETTE[0], alpha=0.8)
        further = [sum(counts[at:]) / values["scored_tokens"] for at in range(len(counts))]
        right.plot(edges[:-1], further, color=PALETTE[0])
        right.set_yscale("log")
        for axis in (left, right):
            axis.set_xscale("log")
            axis.set_xlabel("nats")
            for (name, metric, style), colour in zip(marks, PALETTE[1:], strict=False):
                if values[metric] >= edges[0]:
                    label = f"{name} {values[metric]:.2g}"
                    axis.axvline(values[metric], color=colour, linestyle=style, label=label)
        left.set_title(f"Tokens ({nearest:,.0f} below {edges[0]:.0e} not shown)")
        right.set_title("Share of tokens further away than")
        left.legend(loc="upper left")
    return path
