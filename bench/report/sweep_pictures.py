"""A sweep's own pictures: speed against quality, items lost and gained, and divergence against size."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from bench.report.plot import PALETTE, figure
from bench.report.sweep import VERB, gate_names, weights_of
from bench.store import Results
from bench.variants.standing import Ranking, Standing, rank

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from bench.gates.estimate import Paired
    from bench.gates.score import GateScore

COLOURS = {"pass": PALETTE[2], "fail": PALETTE[3], "undecided": PALETTE[1], None: PALETTE[6]}
COLUMNS = 2
ALL = "all gates"


def sweep_pictures(results: Results, folder: Path, prefix: str = "") -> dict[str, Path]:
    """Every picture that there are figures for, of each sweep: title -> SVG file."""
    made: dict[str, Path] = {}
    for run, manifest in results.manifests.items():
        if manifest.verb != VERB:
            continue
        rows, ranking = results.of(run=run), rank(results, run)
        if any(one.speed is not None and one.quality is not None for one in ranking.standings):
            path = folder / f"{prefix}speed-quality.svg"
            made["Speed against quality"] = draw_speed_quality(ranking, path)
        if any(one.paired is not None for one in ranking.standings):
            path = folder / f"{prefix}losses.svg"
            made["Items lost and gained against full precision"] = draw_losses(ranking.standings, path)
        if (rows["metric"] == "kld_mean").any():
            made["Divergence against size"] = draw_divergence(rows, folder / f"{prefix}divergence.svg")
    return made


def draw_speed_quality(ranking: Ranking, path: Path) -> Path:
    """All gates at once, the front marked, then a panel a gate: speed against score, the threshold a line;
    bars are 95% intervals."""
    gates = gate_names(ranking.standings)
    height = -(-(1 + len(gates)) // COLUMNS)
    with figure(path, rows=height, columns=COLUMNS, width=11, height=4.0 * height) as axes:
        _draw_overall(axes[0], ranking)
        for axis, name in zip(axes[1:], gates, strict=False):
            _draw_gate(axis, name, ranking)
        for axis in axes[1 + len(gates) :]:
            axis.set_axis_off()
        for axis in axes[: 1 + len(gates)]:
            axis.set_ylabel(f"times as fast as {ranking.baseline}", fontsize=8)
            axis.margins(x=0.15, y=0.12)
        axes[0].legend(handles=_key(axes[0], ranking), loc="best", fontsize=8)
    return path


def draw_losses(standings: Sequence[Standing], path: Path) -> Path:
    """A panel a gate and one for all: items lost to the left, gained to the right, and the p value."""
    shown: list[tuple[str, dict[str, Paired | None]]] = [
        (one.name, {gate.gate: gate.paired for gate in one.gates} | {ALL: one.paired}) for one in standings
    ]
    panels = [*gate_names(list(standings)), ALL]
    width = 3.0 * len(panels) + 1.5
    with figure(path, columns=len(panels), width=width, height=1.4 + 0.4 * len(shown)) as axes:
        for axis, panel in zip(axes, panels, strict=True):
            pairs = [
                (place, pair) for place, (_, of) in enumerate(shown) if (pair := of.get(panel)) is not None
            ]
            most = max([1, *(max(pair.lost, pair.gained) for _, pair in pairs)])
            for place, paired in pairs:
                axis.barh(place, -paired.lost, color=PALETTE[3], alpha=1.0 if paired.worse else 0.4)
                axis.barh(place, paired.gained, color=PALETTE[2], alpha=0.7)
                value = paired.p_value
                label = f"p = {value:.2g}" if value >= 0.001 else "p < 0.001"
                axis.text(1.05 * most, place, label, fontsize=8, va="center")
            axis.axvline(0, color="black", linewidth=1)
            axis.set_xlim(-1.1 * most, 1.9 * most)
            axis.set_yticks(range(len(shown)), [name for name, _ in shown] if axis is axes[0] else [])
            axis.set_ylim(len(shown) - 0.5, -0.5)
            axis.set_title(panel, fontsize=9)
            axis.set_xlabel("items lost | gained (pale: may be chance)", fontsize=8)
    return path


def draw_divergence(rows: pd.DataFrame, path: Path) -> Path:
    """KL divergence against bits per weight; variants of one file share a point."""
    points: dict[tuple[float, float, float], list[str]] = {}
    for name in dict.fromkeys(rows["subject"]):
        found = weights_of(rows, name)
        if found.get("kld_mean"):
            point = (found["bits_per_weight"], found["kld_mean"], found.get("kld_p99", 0.0))
            points.setdefault(point, []).append(name)
    ordered = sorted(points)
    with figure(path, width=8, height=4.2) as (axis,):
        bits = [point[0] for point in ordered]
        axis.plot(bits, [point[1] for point in ordered], "o-", color=PALETTE[0], label="mean")
        axis.plot(bits, [point[2] for point in ordered], "o--", color=PALETTE[1], label="99% of tokens below")
        axis.set_yscale("log")
        for point in ordered:
            axis.annotate(
                ", ".join(points[point]), point[:2], xytext=(5, 5), textcoords="offset points", fontsize=8
            )
        axis.set_xlabel("bits per weight")
        axis.set_ylabel("KL divergence from the whole model, nats, every position", fontsize=8)
        axis.margins(x=0.12)
        axis.legend()
    return path


def _draw_overall(axis: "Axes", ranking: Ranking) -> None:
    points = [one for one in ranking.standings if one.speed is not None and one.quality is not None]
    thresholds = any(one.tightest is not None for one in points)
    front = sorted((one.quality or 0.0, _speed(one)) for one in points if one.front)
    axis.plot(
        [x for x, _ in front],
        [y for _, y in front],
        color=PALETTE[0],
        linewidth=1,
        drawstyle="steps-pre",
        label="Pareto front",
        zorder=1,
    )
    for one in points:
        _draw_point(axis, one.quality or 0.0, one, ranking, COLOURS[one.verdict])
    _label(axis, [(one.quality or 0.0, one) for one in points])
    if thresholds:
        axis.axvline(0, color="black", linewidth=1, label="gates")
    axis.set_title("All gates: margin at the tightest" if thresholds else "Mean score")
    axis.set_xlabel("points over the threshold" if thresholds else "score, %")


def _draw_gate(axis: "Axes", name: str, ranking: Ranking) -> None:
    asked: list[tuple[GateScore, Standing]] = [
        (gate, one)
        for one in ranking.standings
        for gate in one.gates
        if gate.gate == name and one.speed is not None
    ]
    for gate, one in asked:
        score = 100 * gate.score
        if gate.low is not None and gate.high is not None:
            reach = [[score - 100 * gate.low], [100 * gate.high - score]]
            axis.errorbar(score, _speed(one), xerr=reach, color=COLOURS[gate.verdict], alpha=0.5, linewidth=1)
        _draw_point(axis, score, one, ranking, COLOURS[gate.verdict])
        if gate.threshold is not None:
            axis.axvline(100 * gate.threshold, color="black", linewidth=1)
    _label(axis, [(100 * gate.score, one) for gate, one in asked])
    axis.set_title(f"{name}: bars 95%, line the threshold")
    axis.set_xlabel("score, %")


def _draw_point(axis: "Axes", x: float, one: Standing, ranking: Ranking, colour: str) -> None:
    ship, ratio = one.name == ranking.recommended, one.speed
    if ratio is not None and ratio.low is not None and ratio.high is not None:
        reach = [[ratio.value - ratio.low], [ratio.high - ratio.value]]
        axis.errorbar(x, ratio.value, yerr=reach, color=colour, alpha=0.5, linewidth=1)
    axis.scatter(
        [x],
        [_speed(one)],
        s=160 if ship else 45,
        marker="*" if ship else "o",
        color=colour,
        edgecolors="black" if one.front else "none",
        linewidths=0.8,
        zorder=3,
    )


def _label(axis: "Axes", points: Sequence[tuple[float, Standing]]) -> None:
    for number, (x, one) in enumerate(sorted(points, key=lambda point: _speed(point[1]))):
        left = bool(number % 2)  # neighbours in speed are labelled on different sides
        axis.annotate(
            one.name,
            (x, _speed(one)),
            xytext=(-7 if left else 7, 3),
            textcoords="offset points",
            ha="right" if left else "left",
            fontsize=8,
        )


def _key(axis: "Axes", ranking: Ranking) -> list[Any]:
    """The legend: the lines, then what colours and marks mean."""
    from matplotlib.lines import Line2D

    handles: list[Any] = list(axis.get_legend_handles_labels()[0])
    for verdict in dict.fromkeys(one.verdict for one in ranking.standings if one.speed is not None):
        label = verdict or "no threshold"
        handles.append(Line2D([], [], marker="o", linestyle="", color=COLOURS[verdict], label=label))
    if ranking.recommended is not None:
        handles.append(Line2D([], [], marker="*", markersize=11, linestyle="", color="black", label="ship"))
    return handles


def _speed(one: Standing) -> float:
    return one.speed.value if one.speed is not None else 0.0
