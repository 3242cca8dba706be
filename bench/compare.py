"""Result files side by side: what they share, ratios to the first, and what differs in how they were made.

    python bench/compare.py before.json after.json
    python bench/compare.py results/2026-11-21/Q8_0.json results/2026-11-21/Q4_K_M.json --plot both.svg

Takes every file that the commands here write, the records of bench/history.py, and the converter's reports.
A ratio is that file's value over the first's. The picture shows times as good: to the right is better,
whichever way the figure counts.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.environment import host, versions
from bench.errors import BenchError
from bench.figures import Document, Figure, figures_of, kind_of, read_document
from bench.options import HelpFormatter, run
from bench.plot import PALETTE, figure
from bench.publish import publish
from bench.results import Record, ResultFile
from bench.table import Cell, Table

SAME = 0.005  # ratios as near to 1 are called neither better nor worse
LONGEST = 60  # characters of a setting that are shown
NAMED = 4  # figures named in the message that there are no shared ones
# what no two runs have in common, or what is a figure or a raw value rather than a setting
OWN = {
    "format", "kind", "command", "started", "seconds", "notes", "raw", "fingerprint", "error", "recommended",
    "samples", "sha256", "text_sha256",
}  # fmt: skip
GROUPS = {
    "host", "versions", "server", "settings", "quality_settings", "variant", "baseline", "provenance",
    "fixed",
}  # fmt: skip


class Row(Record):
    """A shared figure by file. ``ratios`` to the first; None: not there, or the first is 0."""

    name: str
    unit: str
    better: Literal["lower", "higher"] | None
    values: list[float | None]
    ratios: list[float | None]
    times_as_good: list[float | None]


class Comparison(ResultFile):
    """The result file of ``bench.compare``. ``differences``: a setting's values, by file."""

    kind: Literal["comparison"] = "comparison"
    files: list[str]
    kinds: list[str]
    rows: list[Row]
    differences: dict[str, list[str | None]]


def compare(args: argparse.Namespace) -> int:
    """The verb."""
    started, began = datetime.now(UTC).replace(microsecond=0), perf_counter()
    if len(args.files) < 2:
        raise BenchError("want at least two result files")
    documents = [read_document(path) for path in args.files]
    names = short_names(args.files)
    result = Comparison(
        command=args.command,
        url="",
        model=None,
        started=started,
        seconds=perf_counter() - began,
        host=host(),
        card=None,
        versions=versions(),
        notes=[
            f"{n}: {note}" for n, d in zip(names, documents, strict=True) for note in d.get("notes") or []
        ],
        files=names,
        kinds=[kind_of(document) for document in documents],
        rows=shared(args.files, documents),
        differences=differences(documents),
    )
    publish(result, args, tables, draw)
    return 0


def shared(paths: Sequence[Path], documents: Sequence[Document]) -> list[Row]:
    """The first file's figures that another one has too. Raises BenchError for a file that shares none."""
    found: list[dict[str, Figure]] = []
    for path, document in zip(paths, documents, strict=True):
        try:
            found.append(figures_of(document))
        except BenchError as error:
            raise BenchError(f"{path}: {error}") from error
        if not found[-1]:
            raise BenchError(f"{path}: a file of kind {kind_of(document)} without a figure to compare")
    first = found[0]
    for path, document, figures in zip(paths[1:], documents[1:], found[1:], strict=True):
        if not first.keys() & figures.keys():
            raise BenchError(
                f"{paths[0]} ({kind_of(documents[0])}) and {path} ({kind_of(document)}) share no figure: "
                f"the one has {some(first)}; the other {some(figures)}"
            )
    rows: list[Row] = []
    for name, figure_ in first.items():
        line = [figures.get(name) for figures in found]
        if all(one is None for one in line[1:]):
            continue
        rows.append(
            Row(
                name=name,
                unit=figure_.unit,
                better=figure_.better,
                values=[None if one is None else one.value for one in line],
                ratios=[None if one is None else ratio(one.value, figure_.value) for one in line],
                times_as_good=[None if one is None else one.times_as_good(figure_) for one in line],
            )
        )
    return rows


def some(figures: Mapping[str, Figure]) -> str:
    """The first few names, and how many more there are."""
    names = list(figures)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(repr(name) for name in names[:NAMED]) + more


def ratio(value: float, first: float) -> float | None:
    """``value`` over ``first``, None over nothing."""
    return value / first if first else None


def differences(documents: Sequence[Document]) -> dict[str, list[str | None]]:
    """What the files say about how they were made, where they do not all say the same."""
    said = [dict(settings(document)) for document in documents]
    alike = len({kind_of(document) for document in documents}) == 1
    found: dict[str, list[str | None]] = {}
    for name in dict.fromkeys(name for one in said for name in one):
        values = [one.get(name) for one in said]
        # files of different kinds do not say the same things: only what two of them say can differ
        if len(set(values)) > 1 and (alike or len([value for value in values if value is not None]) > 1):
            found[name] = values
    return found


def settings(document: Document) -> list[tuple[str, str]]:
    """Every setting of a result file by name, as text."""
    found: list[tuple[str, str]] = []
    for key, value in document.items():
        if key in OWN or isinstance(value, float):
            continue
        if isinstance(value, dict):
            if key in GROUPS:
                found += [(f"{key} {name}", text(part)) for name, part in flat(value)]
        elif isinstance(value, str | int):
            found.append((key, text(value)))
    latency = document.get("latency")
    if isinstance(latency, dict):  # a variant's
        found += [(f"latency {name}", text(part)) for name, part in flat(latency.get("settings") or {})]
    return found


def flat(group: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """A group's settings, those of groups inside it under both names."""
    found: list[tuple[str, Any]] = []
    for name, value in group.items():
        if isinstance(value, dict):
            found += [(f"{name} {inner}", part) for inner, part in flat(value)]
        elif value is not None:
            found.append((name, value))
    return found


def text(value: Any) -> str:
    """A setting as it is shown."""
    shown = str(value)
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 3]}..."


def short_names(paths: Sequence[Path]) -> list[str]:
    """File names without what they all end in, with as many folders as tell them apart."""
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join((*path.parts[-depth:-1], path.stem)) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{number}: {path.stem}" for number, path in enumerate(paths, 1)]


def tables(result: Comparison) -> list[Table]:
    """The figures, then the differences if there are any."""
    header = ["figure", "", result.files[0]]
    for name in result.files[1:]:
        header += [name, "ratio", ""]
    rows: list[list[Cell]] = []
    for row in result.rows:
        cells: list[Cell] = [row.name, row.unit, digits(row.values[0])]
        for value, times, good in list(zip(row.values, row.ratios, row.times_as_good, strict=True))[1:]:
            cells += [digits(value), None if times is None else f"{times:.3f}", verdict(good)]
        rows.append(cells)
    kinds = ", ".join(dict.fromkeys(result.kinds))
    made = [Table(header, rows, title=f"Against {result.files[0]} ({kinds})", notes=result.notes)]
    if result.differences:
        lines: list[list[Cell]] = [[name, *values] for name, values in result.differences.items()]
        made.append(Table(["differs", *result.files], lines, title="Made differently"))
    return made


def digits(value: float | None) -> Cell:
    """A figure with four significant digits."""
    if value is None:
        return None
    return f"{value:,.0f}" if abs(value) >= 1000 or value == 0 else f"{value:.4g}"


def verdict(times_as_good: float | None) -> str:
    """In a word."""
    if times_as_good is None or abs(times_as_good - 1) < SAME:
        return ""
    return "better" if times_as_good > 1 else "worse"


def draw(result: Comparison, path: Path) -> None:
    """A bar a figure and file: how many times as good as the first. BenchError if none can be drawn."""
    rows = [row for row in result.rows if any(good is not None for good in row.times_as_good[1:])]
    if not rows:
        raise BenchError(f"{path}: no shared figure is better or worse: there is nothing to draw")
    from matplotlib.ticker import LogLocator

    others = result.files[1:]
    thickness = 0.8 / len(others)
    height = 1.3 + len(rows) * max(0.28, 0.16 * len(others))
    with figure(path, title=f"Times as good as {result.files[0]}", width=9, height=height) as (axis,):
        for number, name in enumerate(others, 1):
            bars = [
                (place + thickness * (number - 1 - (len(others) - 1) / 2), good)
                for place, row in enumerate(rows)
                if (good := row.times_as_good[number]) is not None
            ]
            drawn = axis.barh(
                [place for place, _ in bars],
                [good - 1 for _, good in bars],
                thickness * 0.94,
                left=1,
                color=PALETTE[(number - 1) % len(PALETTE)],
                label=name,
            )
            axis.bar_label(drawn, [f"{good:.3g}" for _, good in bars], padding=3, fontsize=7)
        axis.axvline(1, color="black", linewidth=1)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
        axis.set_yticks(range(len(rows)), [row.name for row in rows])
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.grid(axis="y", visible=False)
        axis.set_xlabel("to the right is better")
        axis.margins(x=0.12)
        axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python bench/compare.py", description=__doc__, formatter_class=HelpFormatter
    )
    made.add_argument(
        "files", metavar="FILE", nargs="+", type=Path, help="result files; the first is the measure"
    )
    made.add_argument("--out", type=Path, help="results file (JSON); the picture goes beside it as .png")
    made.add_argument("--plot", type=Path, help="the picture's own file (.png, .svg or .pdf)")
    return made


if __name__ == "__main__":
    sys.exit(run(parser(), compare))
