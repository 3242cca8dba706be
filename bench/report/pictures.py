"""The pictures: one look, drawn from the store's tidy rows alone."""

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pandas as pd

from bench.analysis.statistics import Ratio, percentiles
from bench.errors import BenchError
from bench.load.protocol import CATEGORIES, DISTINCT, OFFICIAL
from bench.metrics import METRICS
from bench.terminal import show

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, told apart by colour-blind readers too.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#666666")
VERDICTS: dict[str | None, str] = {"pass": PALETTE[2], "fail": PALETTE[3], "undecided": PALETTE[1]}
STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "figure.titlesize": 12,
    "font.size": 9.5,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text as text: smaller, and it can be searched
    "svg.hashsalt": "qwen-bench",  # the same figures give the same bytes
}

DRAWN = ("step_time", "prefill_time", "conversion_time")
"""Metrics that get a picture of their own, if there are few enough cells."""
MOST_PANELS = 6


class Placed(Protocol):
    """Where a variant of a sweep stands: speed against the baseline, and points over the tightest gate."""

    @property
    def name(self) -> str: ...
    @property
    def speed(self) -> Ratio | None: ...
    @property
    def quality(self) -> float | None: ...
    @property
    def verdict(self) -> str | None: ...
    @property
    def front(self) -> bool: ...


@contextmanager
def figure(
    path: Path, *, title: str = "", rows: int = 1, columns: int = 1, width: float = 8.0, height: float = 4.5
) -> Iterator[Sequence["Axes"]]:
    """Axes to draw on, row by row; the picture lies at ``path`` (its suffix says png, svg or pdf) afterwards.

    ``width`` and ``height`` are inches. Raises BenchError when the suffix or the folder will not do.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        drawing = Figure(figsize=(width, height), layout="constrained")
        if title:
            drawing.suptitle(title, x=0.01, ha="left", weight="bold", fontsize=10.5)
        axes = list(drawing.subplots(rows, columns, squeeze=False).flat)
        yield axes
        for axis in axes:
            if axis.get_ylim()[1] >= 1000 and axis.get_yscale() == "linear":
                axis.yaxis.set_major_formatter("{x:,.0f}")
        part, kind = path.with_name(f".{path.name}.part"), path.suffix.removeprefix(".")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            undated = {"Date": None} if kind == "svg" else None
            drawing.savefig(part, format=kind or "png", dpi=130, metadata=undated)
            part.replace(path)
        except (OSError, ValueError) as error:
            raise BenchError(f"{path}: the picture cannot be written: {error}") from error


def draw_pictures(frame: pd.DataFrame, folder: Path, *, about: str = "", prefix: str = "") -> dict[str, Path]:
    """Every picture that there are figures for, as SVG files: title -> file. ``about``: model and card."""
    made: dict[str, Path] = {}
    if _measured(frame, "latency", (OFFICIAL, DISTINCT)):
        made["Latency"] = draw_latency(frame, folder / f"{prefix}latency.svg", about)
    if len(loads(frame)):
        made["Throughput"] = draw_throughput(frame, folder / f"{prefix}throughput.svg", about)
    if {"kld_mean", "bits_per_weight"} <= set(frame["metric"]):
        made["Divergence"] = draw_divergence(frame, folder / f"{prefix}divergence.svg")
    for metric in DRAWN:
        if 0 < len(panels_of(frame, metric)) <= MOST_PANELS:
            title = METRICS[metric].title.capitalize()
            made[title] = draw_metric(frame, metric, folder / f"{prefix}{metric}.svg", about)
    return made


def draw_latency(frame: pd.DataFrame, path: Path, about: str = "") -> Path:
    """A panel a category of each protocol, a bar a subject: the median, its whisker from p10 to p90."""
    rows = frame[(frame["metric"] == "latency") & frame["workload"].isin((OFFICIAL, DISTINCT))]
    protocols = [name for name in (OFFICIAL, DISTINCT) if (rows["workload"] == name).any()]
    cells = [name for name in CATEGORIES if (rows["cell"] == name).any()]
    subjects = list(dict.fromkeys(rows["subject"]))
    colours = colours_of(frame)
    found = percentiles(rows, "latency", "workload", "cell", "subject")
    present = {name: [one for one in subjects if _has(found, name, one)] for name in protocols}
    height = 1.3 + sum(0.55 + 0.32 * len(names) for names in present.values())
    title = _titled("Latency of one request at a time, ms (less is better)", about)
    with figure(path, title=title, rows=len(protocols), columns=len(cells), width=11, height=height) as axes:
        for at, axis in enumerate(axes):
            protocol, cell = protocols[at // len(cells)], cells[at % len(cells)]
            names = present[protocol]
            spreads = [found.get((protocol, cell, name)) for name in names]
            known = [(place, spread) for place, spread in enumerate(spreads) if spread is not None]
            medians = [spread.p50 for _, spread in known]
            bars = axis.barh(
                [place for place, _ in known],
                medians,
                0.72,
                color=[colours[names[place]] for place, _ in known],
                xerr=[
                    [spread.p50 - spread.p10 for _, spread in known],
                    [spread.p90 - spread.p50 for _, spread in known],
                ],
                error_kw={"elinewidth": 0.8, "ecolor": "#444444"},
            )
            axis.bar_label(bars, [show(median) for median in medians], padding=4, fontsize=8)
            category = CATEGORIES[cell]
            axis.set_title(
                f"{protocol}, {category.prompt_tokens:,} in, {category.max_tokens} out", fontsize=9
            )
            axis.set_yticks(range(len(names)), names if at % len(cells) == 0 else [""] * len(names))
            axis.set_ylim(len(names) - 0.4, -0.6)
            axis.grid(axis="y", visible=False)
            axis.margins(x=0.2)
            axis.xaxis.set_major_formatter("{x:,.0f}")
    return path


def loads(frame: pd.DataFrame) -> pd.DataFrame:
    """Output tok/s of closed loops, with the level as a column."""
    rows = frame[frame["metric"] == "output_rate"]
    levels = rows["cell"].str.extract(r"^(\d+) concurrent$")[0]
    return rows.assign(level=levels).dropna(subset=["level"]).astype({"level": "int64"})


def draw_throughput(frame: pd.DataFrame, path: Path, about: str = "") -> Path:
    """A panel a workload: output tok/s by concurrency, a line a subject, every round a dot."""
    rows, colours = loads(frame), colours_of(frame)
    workloads = list(dict.fromkeys(rows["workload"]))
    title = _titled("Output tok/s by concurrency (more is better)", about)
    width = 1.5 + 4.7 * len(workloads)
    with figure(path, title=title, columns=len(workloads), width=max(width, 8.5), height=4.2) as axes:
        for axis, workload in zip(axes, workloads, strict=True):
            for subject, some in rows[rows["workload"] == workload].groupby("subject", sort=False):
                medians = some.groupby("level")["value"].median()
                colour = colours[str(subject)]
                axis.plot(medians.index, medians, "-", color=colour, label=str(subject), linewidth=1.6)
                axis.plot(some["level"], some["value"], "o", color=colour, markersize=3.5)
            levels = sorted(rows[rows["workload"] == workload]["level"].unique())
            axis.set_xscale("log", base=2)
            axis.set_xticks(levels, [str(level) for level in levels])
            axis.minorticks_off()
            axis.set_ylim(bottom=0)
            axis.set_xlabel("requests at once")
            axis.set_title(f"{workload} prompts", fontsize=9)
        axes[-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return path


def panels_of(frame: pd.DataFrame, metric: str) -> list[tuple[str, str]]:
    """Every workload and cell that a metric was measured in."""
    rows = frame[frame["metric"] == metric]
    return list(dict.fromkeys(zip(rows["workload"], rows["cell"], strict=True)))


def draw_metric(frame: pd.DataFrame, metric: str, path: Path, about: str = "") -> Path:
    """Any metric: a panel a workload and cell, a bar a subject, every round a dot."""
    rows = frame[frame["metric"] == metric]
    panels = panels_of(frame, metric)
    subjects, colours = list(dict.fromkeys(rows["subject"])), colours_of(frame)
    height = 1.3 + 0.4 * len(subjects)
    title = _titled(f"{METRICS[metric].title}, {METRICS[metric].unit}", about)
    with figure(path, title=title, columns=len(panels), width=2 + 3.2 * len(panels), height=height) as axes:
        for axis, (workload, cell) in zip(axes, panels, strict=True):
            some = rows[(rows["workload"] == workload) & (rows["cell"] == cell)]
            for place, subject in enumerate(subjects):
                values = some[some["subject"] == subject]["value"]
                axis.barh([place], [values.median()], 0.7, color=colours[subject], alpha=0.8)
                axis.plot(values, [place] * len(values), "k.", markersize=4)
            axis.set_yticks(range(len(subjects)), subjects if axis is axes[0] else [""] * len(subjects))
            axis.set_ylim(len(subjects) - 0.4, -0.6)
            axis.set_title(f"{workload}, {cell}", fontsize=9)
            axis.grid(axis="y", visible=False)
    return path


def draw_divergence(frame: pd.DataFrame, path: Path) -> Path:
    """Mean KL divergence against bits per weight, a point a file; files alike share one."""
    wanted = frame[frame["metric"].isin(("bits_per_weight", "kld_mean", "kld_p99"))]
    wide = wanted.pivot_table(index="subject", columns="metric", values="value", aggfunc="median").dropna(
        subset=["bits_per_weight", "kld_mean"]
    )
    with figure(path, title="KL divergence from the whole model, nats (less is better)") as (axis,):
        points = wide.sort_values("bits_per_weight")
        for metric, style, label in (("kld_mean", "o-", "mean"), ("kld_p99", "o--", "99% of tokens below")):
            if metric in points:
                axis.plot(points["bits_per_weight"], points[metric], style, label=label)
        axis.set_yscale("log")
        alike: dict[tuple[float, float], list[str]] = {}
        for name, at in zip(points.index, points[["bits_per_weight", "kld_mean"]].to_numpy(), strict=True):
            alike.setdefault((float(at[0]), float(at[1])), []).append(str(name))
        for (bits, kld), names in alike.items():
            _name(axis, bits, kld, ", ".join(names), right=True)
        axis.set_xlabel("bits per weight")
        axis.margins(x=0.12)
        axis.legend()
    return path


def draw_speed_quality(places: Sequence[Placed], recommended: str | None, path: Path) -> Path:
    """Speed with its interval against the margin at the tightest gate; the front a line, a star what to
    ship."""
    from matplotlib.lines import Line2D

    known = [(one.quality, one.speed, one) for one in places if one.speed and one.quality is not None]
    front = sorted((x, speed.value) for x, speed, one in known if one.front)
    with figure(path, title="Speed against quality (up and right is better)", width=8.5) as (axis,):
        axis.plot([x for x, _ in front], [y for _, y in front], drawstyle="steps-pre", linewidth=1)
        for number, (x, speed, one) in enumerate(sorted(known, key=lambda point: point[1].value)):
            ship, colour = one.name == recommended, VERDICTS.get(one.verdict, PALETTE[6])
            if speed.low is not None and speed.high is not None:
                axis.plot([x, x], [speed.low, speed.high], color=colour, alpha=0.5, linewidth=1)
            axis.plot([x], [speed.value], "*" if ship else "o", ms=13 if ship else 6, color=colour)
            _name(axis, x, speed.value, one.name, right=number % 2 == 0)  # neighbours on different sides
        axis.axvline(0, color="black", linewidth=1)
        axis.set_xlabel("points over the threshold at the tightest gate")
        axis.set_ylabel("speed")
        axis.margins(x=0.15, y=0.12)
        marks = {str(one.verdict): VERDICTS.get(one.verdict, PALETTE[6]) for _, _, one in known}
        key = [Line2D([], [], ls="", marker="o", color=colour, label=name) for name, colour in marks.items()]
        if recommended is not None:
            key.append(Line2D([], [], ls="", marker="*", ms=11, color="black", label="ship"))
        key.append(Line2D([], [], linewidth=1, label="Pareto front"))
        axis.legend(handles=key, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return path


def _name(axis: "Axes", x: float, y: float, text: str, *, right: bool) -> None:
    side, at = ("left", 7) if right else ("right", -7)
    axis.annotate(text, (x, y), xytext=(at, 4), textcoords="offset points", ha=side, fontsize=8)


def colours_of(frame: pd.DataFrame) -> dict[str, str]:
    """A colour for each subject, the same in every picture of one page."""
    return {
        str(name): PALETTE[number % len(PALETTE)]
        for number, name in enumerate(dict.fromkeys(frame["subject"]))
    }


def _titled(what: str, about: str) -> str:
    return "\n".join(filter(None, (what, *textwrap.wrap(about, 84))))


def _measured(frame: pd.DataFrame, metric: str, workloads: Sequence[str]) -> bool:
    return bool(((frame["metric"] == metric) & frame["workload"].isin(workloads)).any())


def _has(found: dict[tuple[str, ...], Any], workload: str, subject: str) -> bool:
    return any((workload, cell, subject) in found for cell in CATEGORIES)
