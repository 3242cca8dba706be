"""A sweep's own pictures: speed against quality, items lost and gained, and divergence against size."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from qwen_serve.bench.report.plot import PALETTE, VERDICTS, figure
from qwen_serve.bench.report.sweep import ALL_GATES, VERB, gate_names, paired_of, weights_of
from qwen_serve.bench.store import Results
from qwen_serve.bench.variants.standing import Ranking, Standing, rank


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
    """All gates at once: the margin at the tightest, the front marked; bars are 95% intervals."""
    points = [one for one in ranking.standings if one.speed is not None and one.quality is not None]
    thresholds = any(one.tightest is not None for one in points)
    front = sorted((one.quality or 0.0, _speed(one)) for one in points if one.front)
    with figure(path, width=8, height=4.6) as (axis,):
        axis.plot(
            [x for x, _ in front],
            [y for _, y in front],
            color=PALETTE[0],
            linewidth=1,
            drawstyle="steps-pre",
            label="Pareto front",
            zorder=1,
        )
        for number, one in enumerate(sorted(points, key=_speed)):
            ship, ratio, colour = one.name == ranking.recommended, one.speed, VERDICTS[one.verdict]
            x, y = one.quality or 0.0, _speed(one)
            if ratio is not None and ratio.low is not None and ratio.high is not None:
                reach = [[y - ratio.low], [ratio.high - y]]
                axis.errorbar(x, y, yerr=reach, color=colour, alpha=0.5, linewidth=1)
            label = f"{one.name}: {one.verdict or 'no threshold'}{', ship' if ship else ''}"
            edges, size = "black" if one.front else "none", 160 if ship else 45
            axis.scatter(
                [x], [y], s=size, marker="*" if ship else "o", color=colour, edgecolors=edges, zorder=3
            )
            side = -7 if number % 2 else 7  # neighbours in speed are labelled on different sides
            axis.annotate(
                label,
                (x, y),
                xytext=(side, 3),
                textcoords="offset points",
                ha="right" if side < 0 else "left",
                fontsize=8,
            )
        if thresholds:
            axis.axvline(0, color="black", linewidth=1, label="gates")
        axis.set_title("All gates: margin at the tightest" if thresholds else "Mean score")
        axis.set_xlabel("points over the threshold" if thresholds else "score, %")
        axis.set_ylabel(f"times as fast as {ranking.baseline}", fontsize=8)
        axis.margins(x=0.3, y=0.12)
        axis.legend(fontsize=8)
    return path


def draw_losses(standings: Sequence[Standing], path: Path) -> Path:
    """A panel a gate and one for all: items lost to the left, gained to the right, and the p value."""
    shown = [(one.name, paired_of(one)) for one in standings]
    panels = [*gate_names(list(standings)), ALL_GATES]
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
                axis.text(1.05 * most, place, paired.p_text, fontsize=8, va="center")
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
    with figure(path, width=9, height=4.6) as (axis,):
        bits = [point[0] for point in ordered]
        axis.plot(bits, [point[1] for point in ordered], "o", color=PALETTE[0], label="mean")
        axis.plot(bits, [point[2] for point in ordered], "^", color=PALETTE[1], label="99% of tokens below")
        axis.set_yscale("log")
        for number, point in enumerate(ordered):
            left = number % 2 == 0  # neighbours in size are labelled on different sides
            axis.annotate(
                ", ".join(points[point]),
                point[:2],
                xytext=(-6 if left else 6, -9 if left else 4),
                textcoords="offset points",
                ha="right" if left else "left",
                fontsize=7,
            )
        axis.set_xlabel("bits per weight")
        axis.set_ylabel("KL divergence from the whole model, nats, every position", fontsize=8)
        axis.margins(x=0.12)
        axis.legend()
    return path


def _speed(one: Standing) -> float:
    return one.speed.value if one.speed is not None else 0.0
