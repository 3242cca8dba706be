"""Tables and pictures of the history: the records, the best so far, and what each step of a lineage gave."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC
from itertools import cycle, pairwise
from pathlib import Path

import numpy as np

from bench.errors import BenchError
from bench.history_record import Experiment, Figure
from bench.plot import PALETTE, figure
from bench.table import Cell, Table, show

BETTER, WORSE, TOTAL = PALETTE[2], PALETTE[3], PALETTE[6]


@dataclass(frozen=True, slots=True)
class Point:
    """One record's value of the figure in question, and whether it was the best valid one when it came."""

    record: Experiment
    figure: Figure
    leads: bool


def overview(records: Mapping[str, Experiment]) -> Table:
    """A row a record, oldest first."""
    rows: list[list[Cell]] = [
        [
            record.name,
            f"{record.date:%Y-%m-%d %H:%M}",
            record.parent or "",
            record.validity,
            record.card,
            "; ".join(f"{name} {shown(one)}" for name, one in record.figures.items()),
        ]
        for record in records.values()
    ]
    return Table(["experiment", "date", "parent", "validity", "card", "figures"], rows)


def details(record: Experiment) -> str:
    """One record in full, for reading."""
    table = Table(
        ["figure", "value", "better", "from"],
        [
            [name, shown(one), one.better, "" if one.source is None else one.source.file + one.source.path]
            for name, one in record.figures.items()
        ],
    )
    lines = [
        f"{record.name}, {record.date.isoformat()}, {record.validity}",
        *(f"  risk: {risk}" for risk in record.risks),
        f"  parent: {record.parent or 'none'}",
        f"  changed: {record.changed}",
        *(f"  fixed: {key} = {value}" for key, value in record.fixed.items()),
        f"  card: {record.card}",
        f"  command: {' '.join(record.command)}",
        *(f"  version: {key} {value}" for key, value in record.versions.items()),
        *(f"  note: {note}" for note in record.notes),
    ]
    return "\n".join([*lines, "", str(table)])


def shown(one: Figure) -> str:
    """A value with its unit."""
    return f"{show(float(one.value))} {one.unit}"


def points(records: Sequence[Experiment], name: str) -> list[Point]:
    """Every record that has figure ``name``, in order; the best so far is one for each card.

    Raises:
        BenchError: no record has it, or they do not agree on its unit and direction.
    """
    found = [(record, record.figures[name]) for record in records if name in record.figures]
    if not found:
        known = ", ".join(sorted({one for record in records for one in record.figures})) or "none"
        raise BenchError(f"--figure {name}: in no record; there are {known}")
    if len({(one.unit, one.better) for _, one in found}) > 1:
        said = "; ".join(f"{record.name}: {one.unit}, {one.better} is better" for record, one in found)
        raise BenchError(f"--figure {name}: not the same in every record: {said}")
    best: dict[str, float] = {}
    result = []
    for record, one in found:
        before = best.get(record.card)
        leads = record.validity == "valid" and (before is None or one.improves_on(before))
        if leads:
            best[record.card] = one.value
        result.append(Point(record, one, leads))
    return result


def frontier_table(found: Sequence[Point], name: str) -> Table:
    """A row a record, those that led when they came marked."""
    rows: list[list[Cell]] = [
        [
            f"{point.record.date:%Y-%m-%d %H:%M}",
            point.record.name,
            point.record.card,
            shown(point.figure),
            "best so far" if point.leads else "",
            point.record.validity,
        ]
        for point in found
    ]
    title = f"{name} over time, {found[0].figure.better} is better; risky figures never lead"
    return Table(["date", "experiment", "card", name, "", "validity"], rows, title=title)


def draw_frontier(found: Sequence[Point], name: str, path: Path) -> None:
    """Every record as a point, valid ones full, and for each card the best so far as a staircase."""
    one = found[0].figure
    cards = list(dict.fromkeys(point.record.card for point in found))
    with figure(path, title=f"{name} over time ({one.better} is better)", width=9) as (axis,):
        for card, colour in zip(cards, cycle(PALETTE), strict=False):
            mine = [point for point in found if point.record.card == card]
            dates = np.array(
                [p.record.date.astimezone(UTC).replace(tzinfo=None) for p in mine], "datetime64[s]"
            )
            values = np.array([point.figure.value for point in mine])
            leads = np.array([point.leads for point in mine])
            if leads.any():
                ends = [*np.flatnonzero(leads), np.flatnonzero(leads)[-1]]
                until = np.append(dates[leads], dates[-1:])
                axis.step(until, values[ends], where="post", color=colour, label=card)
            valid = np.array([point.record.validity == "valid" for point in mine])
            axis.scatter(dates[valid], values[valid], color=colour, zorder=3)
            axis.scatter(dates[~valid], values[~valid], facecolors="none", edgecolors=colour, zorder=3)
            for date, point in zip(dates, mine, strict=True):
                label = point.record.name + ("" if point.record.validity == "valid" else " (risky)")
                spot = (date, point.figure.value)
                axis.annotate(label, spot, xytext=(4, 4), textcoords="offset points", fontsize=7.5)
        axis.tick_params(axis="x", rotation=25)
        axis.set_ylabel(f"{name}, {one.unit}")
        if any(point.leads for point in found):
            axis.legend()


def lineage_points(chain: Sequence[Experiment], name: str | None) -> tuple[str, list[Point]]:
    """The figure's name (the last record's first one if None), and the records of ``chain`` that have it.

    Raises:
        BenchError: as `points`, or the records are of several cards.
    """
    name = name or next(iter(chain[-1].figures))
    found = points(chain, name)
    if len(cards := list(dict.fromkeys(point.record.card for point in found))) > 1:
        raise BenchError(f"{chain[-1].name}: its lineage was measured on several cards: {', '.join(cards)}")
    return name, found


def lineage_table(found: Sequence[Point], name: str) -> Table:
    """A row a step: the value, what the step gave, and the factor since the beginning."""
    first = found[0].figure.value
    rows: list[list[Cell]] = []
    for i, point in enumerate(found):
        value = point.figure.value
        step = value - found[i - 1].figure.value if i else None
        factor = None if not (i and first and value) else value / first
        if factor is not None and point.figure.better == "lower":
            factor = 1 / factor
        rows.append(
            [point.record.name, point.record.changed, value, step, factor, point.record.validity],
        )
    header = ["experiment", "what changed", f"{name}, {found[0].figure.unit}", "step", "x since", "validity"]
    return Table(header, rows, title=f"The way to {found[-1].record.name}: {name}")


def draw_lineage(found: Sequence[Point], name: str, path: Path) -> None:
    """A waterfall: the first value, what every step took off or put on, and the last value."""
    one = found[0].figure
    title = f"{name}: the way to {found[-1].record.name} ({one.better} is better)"
    with figure(path, title=title, width=max(6.0, 1.6 * (len(found) + 1)), height=4.8) as (axis,):
        axis.bar(0, one.value, color=TOTAL)
        axis.annotate(show(float(one.value)), (0, one.value), ha="center", va="bottom", fontsize=8)
        for x, (before, after) in enumerate(pairwise(found), start=1):
            low, high = sorted((before.figure.value, after.figure.value))
            step = after.figure.value - before.figure.value
            axis.bar(
                x,
                high - low,
                bottom=low,
                color=BETTER if after.figure.improves_on(before.figure.value) else WORSE,
                hatch="//" if after.record.validity == "risky" else None,
                edgecolor="white",
            )
            axis.plot([x - 1.4, x + 0.4], [before.figure.value] * 2, color="#888888", linewidth=0.8)
            sign = "+" if step > 0 else ""
            axis.annotate(f"{sign}{show(float(step))}", (x, high), ha="center", va="bottom", fontsize=8)
        last = found[-1].figure.value
        axis.bar(len(found), last, color=TOTAL)
        axis.annotate(show(float(last)), (len(found), last), ha="center", va="bottom", fontsize=8)
        names = [*(point.record.name for point in found), "result"]
        axis.set_xticks(range(len(names)), names, rotation=25, ha="right")
        axis.set_ylabel(one.unit)
        axis.grid(visible=False, axis="x")
