"""The sweep's pictures, each an SVG file."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.plot import PALETTE, figure
from bench.table import show
from bench.variants.result import Standing, SweepResult, VariantResult
from bench.variants.tables import by_column, gate_names, latency_columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Results = Sequence[VariantResult]
COLOURS = {"pass": PALETTE[2], "fail": PALETTE[3], "undecided": PALETTE[1], None: PALETTE[6]}
PROTOCOL_COLOURS = {"official": PALETTE[0], "distinct": PALETTE[1]}


def draw(sweep: SweepResult, results: Results, folder: Path) -> dict[str, Path]:
    """Every picture that there are figures for: title -> file."""
    import matplotlib as mpl

    made: dict[str, Path] = {}
    with mpl.rc_context({"svg.fonttype": "none"}):  # text as text: smaller, and it can be searched
        if any(standing.speed is not None and standing.quality is not None for standing in sweep.standings):
            made["Speed against quality"] = speed_quality(sweep, results, folder / "speed-quality.svg")
        if any(result.weights and result.weights.divergence for result in results):
            made["Divergence against size"] = divergence(results, folder / "divergence.svg")
        if latency_columns(results):
            made["Latency by category"] = latencies(results, folder / "latency.svg")
    return made


def speed_quality(sweep: SweepResult, results: Results, path: Path) -> Path:
    """All gates at once, the front marked, then a panel a gate: speed against score, the threshold a line."""
    gates, standings = gate_names(results), {standing.name: standing for standing in sweep.standings}
    columns = 2
    rows = -(-(1 + len(gates)) // columns)
    with figure(path, rows=rows, columns=columns, width=11, height=4.0 * rows) as axes:
        _overall(axes[0], sweep)
        for axis, name in zip(axes[1:], gates, strict=False):
            _gate(axis, name, results, standings, sweep.recommended)
        for axis in axes[1 + len(gates) :]:
            axis.set_axis_off()
        for axis in axes:
            axis.set_ylabel("speed (higher is better)")
        axes[0].legend(handles=_key(axes[0], sweep), loc="best", fontsize=8)
    return path


def _overall(axis: "Axes", sweep: SweepResult) -> None:
    points = [
        (s.quality, s.speed, s) for s in sweep.standings if s.speed is not None and s.quality is not None
    ]
    thresholds = any(s.tightest is not None for _, _, s in points)
    front = sorted((x, y) for x, y, s in points if s.front)
    axis.plot(
        [x for x, _ in front],
        [y for _, y in front],
        color=PALETTE[0],
        linewidth=1,
        drawstyle="steps-pre",
        label="Pareto front",
        zorder=1,
    )
    for x, y, standing in points:
        _point(axis, x, y, standing, sweep.recommended)
    _label(axis, [(x, y, s.name) for x, y, s in points])
    if thresholds:
        axis.axvline(0, color="black", linewidth=1, label="gates")
    axis.set_title("All gates: margin at the tightest" if thresholds else "Mean score")
    axis.set_xlabel("points over the threshold" if thresholds else "score, %")
    axis.margins(x=0.15, y=0.12)


def _key(axis: "Axes", sweep: SweepResult) -> list[Any]:
    """The legend: the lines, then what colours and marks mean."""
    from matplotlib.lines import Line2D

    handles: list[Any] = list(axis.get_legend_handles_labels()[0])
    for verdict in dict.fromkeys(s.verdict for s in sweep.standings if s.speed is not None):
        label = verdict or "no threshold"
        handles.append(Line2D([], [], marker="o", linestyle="", color=COLOURS[verdict], label=label))
    if sweep.recommended is not None:
        handles.append(Line2D([], [], marker="*", markersize=11, linestyle="", color="black", label="ship"))
    return handles


def _gate(
    axis: "Axes", name: str, results: Results, standings: dict[str, Standing], recommended: str | None
) -> None:
    labels: list[tuple[float, float, str]] = []
    for result in results:
        gate = next((gate for gate in result.gates if gate.gate == name), None)
        standing = standings[result.variant.name]
        if gate is None or standing.speed is None:
            continue
        score = 100 * gate.score
        if gate.low is not None and gate.high is not None:
            reach = [[score - 100 * gate.low], [100 * gate.high - score]]
            axis.errorbar(
                score, standing.speed, xerr=reach, color=COLOURS[gate.verdict], alpha=0.5, linewidth=1
            )
        _point(axis, score, standing.speed, standing, recommended, colour=COLOURS[gate.verdict])
        labels.append((score, standing.speed, standing.name))
        if gate.threshold is not None:
            axis.axvline(100 * gate.threshold, color="black", linewidth=1)
    _label(axis, labels)
    axis.set_title(f"{name}: bars 95%, line the threshold")
    axis.set_xlabel("score, %")
    axis.margins(x=0.15, y=0.12)


def _point(
    axis: "Axes",
    x: float,
    y: float,
    standing: Standing,
    recommended: str | None,
    *,
    colour: str | None = None,
) -> None:
    ship = standing.name == recommended
    axis.scatter(
        [x],
        [y],
        s=160 if ship else 45,
        marker="*" if ship else "o",
        color=colour or COLOURS[standing.verdict],
        edgecolors="black" if standing.front else "none",
        linewidths=0.8,
        zorder=3,
    )


def _label(axis: "Axes", points: Sequence[tuple[float, float, str]]) -> None:
    for number, (x, y, name) in enumerate(sorted(points, key=lambda point: point[1])):
        # neighbours in speed are labelled on different sides
        left = bool(number % 2)
        axis.annotate(
            name,
            (x, y),
            xytext=(-7 if left else 7, 3),
            textcoords="offset points",
            ha="right" if left else "left",
            fontsize=8,
        )


def divergence(results: Results, path: Path) -> Path:
    """KL divergence against bits per weight."""
    points: dict[tuple[float, float, float], list[str]] = {}
    for result in results:
        weights = result.weights
        if weights is not None and weights.divergence:
            key = (weights.bits, weights.divergence, weights.divergence_p99 or 0.0)
            points.setdefault(key, []).append(result.variant.name)
    ordered = sorted(points)
    with figure(path, width=8, height=4.2) as (axis,):
        bits = [point[0] for point in ordered]
        axis.plot(bits, [point[1] for point in ordered], "o-", color=PALETTE[0], label="mean")
        axis.plot(bits, [point[2] for point in ordered], "o--", color=PALETTE[1], label="99% of tokens below")
        axis.set_yscale("log")
        for point in ordered:
            axis.annotate(
                ", ".join(points[point]),
                (point[0], point[1]),
                xytext=(5, 5),
                textcoords="offset points",
                fontsize=8,
            )
        axis.set_xlabel("bits per weight")
        axis.set_ylabel("KL divergence from the whole model, nats")
        axis.margins(x=0.12)
        axis.legend()
    return path


def latencies(results: Results, path: Path) -> Path:
    """A panel a category, a bar a variant and protocol, whiskers from p10 to p90."""
    measured = [result for result in results if result.latency is not None]
    columns = latency_columns(results)
    categories = list(dict.fromkeys(category for category, _ in columns))
    protocols = list(dict.fromkeys(protocol for _, protocol in columns))
    thickness = 0.8 / len(protocols)
    height = 1.2 + 0.42 * len(measured)
    with figure(path, columns=len(categories), width=12, height=height) as axes:
        for axis, category in zip(axes, categories, strict=True):
            for offset, protocol in enumerate(protocols):
                places, spreads = [], []
                for place, result in enumerate(measured):
                    line = by_column(result).get((category, protocol))
                    if line is not None and line.latency is not None:
                        places.append(place + thickness * (offset - (len(protocols) - 1) / 2))
                        spreads.append(line.latency)
                medians = [1000 * spread.p50 for spread in spreads]
                whiskers = [
                    [1000 * (spread.p50 - spread.p10) for spread in spreads],
                    [1000 * (spread.p90 - spread.p50) for spread in spreads],
                ]
                bars = axis.barh(
                    places,
                    medians,
                    thickness * 0.94,
                    xerr=whiskers,
                    error_kw={"elinewidth": 0.8, "ecolor": "#444444"},
                    color=PROTOCOL_COLOURS[protocol],
                    label=protocol,
                )
                axis.bar_label(bars, [show(median) for median in medians], padding=3, fontsize=7)
            axis.set_title(f"{category}, ms (lower is better)")
            first = axis is axes[0]
            axis.set_yticks(range(len(measured)), [r.variant.name if first else "" for r in measured])
            axis.set_ylim(len(measured) - 0.5, -0.5)
            axis.grid(axis="y", visible=False)
            axis.margins(x=0.16)
        axes[-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return path
