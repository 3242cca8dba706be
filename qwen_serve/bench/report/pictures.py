"""Charts of the store's rows."""

import textwrap
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from qwen_serve.bench.load.protocol import CATEGORIES, DISTINCT, OFFICIAL
from qwen_serve.bench.metrics import METRICS
from qwen_serve.bench.report.plot import PALETTE, figure
from qwen_serve.bench.terminal import show


def draw_pictures(frame: pd.DataFrame, folder: Path, *, about: str = "", prefix: str = "") -> dict[str, Path]:
    """Draw all charts that have data, as SVG files. Returns title -> file. ``about``: model and GPU."""
    made: dict[str, Path] = {}
    if len(latencies(frame)):
        made["Latency"] = draw_latency(frame, folder / f"{prefix}latency.svg", about)
    if len(loads(frame)):
        made["Throughput"] = draw_throughput(frame, folder / f"{prefix}throughput.svg", about)
    if len(open_loops(frame)):
        made["Goodput"] = draw_open_loops(frame, folder / f"{prefix}goodput.svg", about)
    return made


def draw_latency(frame: pd.DataFrame, path: Path, about: str = "") -> Path:
    """Draw a panel for each category of each protocol, with a bar for each subject: the median, with a
    whisker from p10 to p90.
    """
    rows = latencies(frame)
    protocols = [name for name in (OFFICIAL, DISTINCT) if (rows["workload"] == name).any()]
    cells = [name for name in CATEGORIES if (rows["cell"] == name).any()]
    colours = colours_of(frame)
    names = {one: rows[rows["workload"] == one]["subject"].unique() for one in protocols}
    height = 1.3 + sum(0.55 + 0.32 * len(present) for present in names.values())
    title = _titled("Latency of one request at a time, ms (less is better)", about)
    with figure(path, title=title, rows=len(protocols), columns=len(cells), width=11, height=height) as axes:
        for axis, (protocol, cell) in zip(axes, product(protocols, cells), strict=True):
            panel = rows[(rows["workload"] == protocol) & (rows["cell"] == cell)]
            spread = panel.groupby("subject")["value"].quantile(np.array([0.1, 0.5, 0.9])).unstack()
            spread = spread.reindex(names[protocol])
            bars = axis.barh(
                range(len(spread)),
                spread[0.5],
                0.72,
                color=[colours[str(name)] for name in spread.index],
                xerr=[spread[0.5] - spread[0.1], spread[0.9] - spread[0.5]],
                error_kw={"elinewidth": 0.8, "ecolor": "#444444"},
            )
            labels = ["" if np.isnan(median) else show(float(median)) for median in spread[0.5]]
            axis.bar_label(bars, labels, padding=4, fontsize=8)
            category = CATEGORIES[cell]
            axis.set_title(
                f"{protocol}, {category.prompt_tokens:,} in, {category.max_tokens} out", fontsize=9
            )
            axis.set_yticks(range(len(spread)), spread.index if cell == cells[0] else [""] * len(spread))
            axis.set_ylim(len(spread) - 0.4, -0.6)
            axis.grid(axis="y", visible=False)
            axis.margins(x=0.2)
            axis.xaxis.set_major_formatter("{x:,.0f}")
    return path


def latencies(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of both latency protocols, without the load that is also called distinct."""
    single = frame["workload"].isin((OFFICIAL, DISTINCT)) & frame["cell"].isin(CATEGORIES)
    return frame[(frame["metric"] == "latency") & single]


def loads(frame: pd.DataFrame) -> pd.DataFrame:
    """Output tok/s of closed loops, with the concurrency in the column `level`."""
    return _with_level(frame[frame["metric"] == "output_rate"], r"^(\d+) concurrent$")


def open_loops(frame: pd.DataFrame) -> pd.DataFrame:
    """Goodput of open loops, or request rate without limits, with the offered rate in the column `level`."""
    metric = "goodput" if (frame["metric"] == "goodput").any() else "request_rate"
    return _with_level(frame[frame["metric"] == metric], r"^([\d.]+) req/s$")


def draw_throughput(frame: pd.DataFrame, path: Path, about: str = "") -> Path:
    title = _titled("Output tok/s by concurrency (more is better)", about)
    return _draw_levels(loads(frame), colours_of(frame), path, title, "requests at once")


def draw_open_loops(frame: pd.DataFrame, path: Path, about: str = "") -> Path:
    """Draw goodput by offered rate. Points below the diagonal are requests that were late or failed."""
    rows = open_loops(frame)
    title = _titled(f"{METRICS[str(rows['metric'].iloc[0])].title} (more is better)", about)
    return _draw_levels(rows, colours_of(frame), path, title, "requests a second, offered")


def _with_level(rows: pd.DataFrame, pattern: str) -> pd.DataFrame:
    levels = rows["cell"].str.extract(pattern)[0]
    return rows.assign(level=levels).dropna(subset=["level"]).astype({"level": "float64"})


def _draw_levels(rows: pd.DataFrame, colours: Mapping[str, str], path: Path, title: str, what: str) -> Path:
    """Draw a panel for each workload, with a line for each subject and a dot for each round."""
    workloads = list(dict.fromkeys(rows["workload"]))
    width = 1.5 + 4.7 * len(workloads)
    with figure(path, title=title, columns=len(workloads), width=max(width, 8.5), height=4.2) as axes:
        for axis, workload in zip(axes, workloads, strict=True):
            own = rows[rows["workload"] == workload]
            for subject, some in own.groupby("subject", sort=False):
                medians, colour = some.groupby("level")["value"].median(), colours[str(subject)]
                axis.plot(medians.index, medians, "-", color=colour, label=str(subject), linewidth=1.6)
                axis.plot(some["level"], some["value"], "o", color=colour, markersize=3.5)
            levels = sorted(own["level"].unique())
            axis.set_xscale("log", base=2)
            axis.set_xticks(levels, [f"{level:g}" for level in levels])
            axis.minorticks_off()
            axis.set_ylim(bottom=0)
            axis.set_xlabel(what)
            axis.set_title(f"{workload} prompts", fontsize=9)
        axes[-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return path


def colours_of(frame: pd.DataFrame) -> dict[str, str]:
    """Subject -> colour, the same in all charts of a page."""
    return {
        str(name): PALETTE[number % len(PALETTE)]
        for number, name in enumerate(dict.fromkeys(frame["subject"]))
    }


def _titled(what: str, about: str) -> str:
    return "\n".join(filter(None, (what, *textwrap.wrap(about, 84))))
