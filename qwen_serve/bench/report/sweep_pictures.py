"""Charts of a sweep: items lost and gained, and divergence against size."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from qwen_serve.bench.report.plot import PALETTE, figure
from qwen_serve.bench.report.sweep import ALL_GATES, VERB, gate_names, paired_of, weights_of
from qwen_serve.bench.store import Results
from qwen_serve.bench.variants.standing import Standing, rank


def sweep_pictures(results: Results, folder: Path, prefix: str = "") -> dict[str, Path]:
    """Draw the charts that have data, for each sweep. Returns title -> SVG file."""
    made: dict[str, Path] = {}
    for run, manifest in results.manifests.items():
        if manifest.verb != VERB:
            continue
        rows, ranking = results.of(run=run), rank(results, run)
        if any(one.paired is not None for one in ranking.standings):
            path = folder / f"{prefix}losses.svg"
            made["Items lost and gained against full precision"] = draw_losses(ranking.standings, path)
        if (rows["metric"] == "kld_mean").any():
            made["Divergence against size"] = draw_divergence(rows, folder / f"{prefix}divergence.svg")
    return made


def draw_losses(standings: Sequence[Standing], path: Path) -> Path:
    """Draw a panel for each gate and one for all gates: items lost to the left, gained to the right, and the
    p value."""
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
    """Draw KL divergence against bits per weight. Variants with the same file share a point."""
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
            left = number % 2 == 0  # labels of neighbours alternate between the two sides
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
