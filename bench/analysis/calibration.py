"""What a card really reaches, from measurements of the same engine: bandwidth, compute by rows, launch time.

Measurements are runs in a store that time the engine alone: of `steps`, or of `peers` with its ceiling. Two
of models of different sizes tell the bandwidth from the launches; from one alone, the bandwidth is taken as
the datasheet's and all the rest as launches.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import pandas as pd

from bench.analysis.cards import CARDS, Card, preset_of
from bench.analysis.geometry import Geometry, Work
from bench.errors import BenchError
from bench.servers.ceiling import read_ceiling
from bench.store import Results, load

APART = 1.3  # how much more bytes one decode step must move than another to tell bandwidth from launches
MARGIN = 0.05  # by which a phase must be slower than its memory to be bound by the compute
CELL = re.compile(r"(?P<sequences>[\d,]+) sequences? of (?P<tokens>[\d,]+)")


def sequences_cell(sequences: int, tokens: int) -> str:
    """The name of a cell of `steps`: so many sequences, each with so many tokens behind it."""
    return f"{sequences} sequence{'s' if sequences > 1 else ''} of {tokens:,}"


@dataclass(frozen=True)
class Point:
    """A measured phase: its passes and their time together."""

    what: str
    passes: tuple[Work, ...]
    seconds: float

    @property
    def integer(self) -> bool:
        """Whether the weights are quantized."""
        return self.passes[0].integer

    @property
    def is_decode(self) -> bool:
        return all(work.rows == 1 for work in self.passes)


@dataclass(frozen=True)
class Calibration:
    """Shares of the datasheet's figures that were reached on `card`, and seconds a kernel's launch takes.

    `compute_shares`: (rows of a pass, share of the F16 rate), of weights that are quantized if `integer`.
    """

    card: str
    files: list[str]
    bandwidth_share: float
    launch_seconds: float
    compute_shares: list[tuple[float, float]]
    points: list[str]
    integer: bool

    def apply(self, card: Card) -> Card:
        """A card that is used as well as this one was.

        The same share of its bandwidth, the same launches, and of the compute the same rates in proportion to
        the cards' F32 rates (multiprocessors times clock: what feeds the tensor cores), up to its peak.
        """
        measured = CARDS[self.card]
        scale = measured.compute / card.compute * card.vector / measured.vector
        most = card.peak(self.integer) / card.compute
        return replace(
            card,
            bandwidth=card.bandwidth * self.bandwidth_share,
            launch=self.launch_seconds,
            compute_shares=tuple((rows, min(most, share * scale)) for rows, share in self.compute_shares),
        )


def card_of(path: Path, results: Results, named: str | None) -> Card:
    """The preset that the measurement's card is. Raises BenchError when it is none and none is `named`."""
    recorded = {manifest.card or "no card" for manifest in results.manifests.values()}
    found = {card.name: card for text in ({named} if named else recorded) if (card := preset_of(text))}
    if len(found) == 1:
        return next(iter(found.values()))
    raise BenchError(
        f"--calibrate {path}: measured on {named or ', '.join(sorted(recorded))}; "
        f"say which of {', '.join(CARDS)} that is with --calibrate-card"
    )


def read_points(path: Path, geometry: Geometry, named: str | None = None) -> tuple[Card, list[Point]]:
    """The card and the phases that a store tells of a model. Raises BenchError: there are none."""
    results = load([path])
    card = card_of(path, results, named)
    frame = results.frame
    points = [*_step_points(frame, geometry), *_ceiling_points(frame, geometry)]
    if not any(point.is_decode for point in points):
        raise BenchError(
            f"--calibrate {path}: no decode of a single sequence in it; want a run of steps, or of "
            "peers with its ceiling"
        )
    return card, points


def _step_points(frame: pd.DataFrame, geometry: Geometry) -> Iterator[Point]:
    measured = frame[frame["metric"].isin(("step_time", "prefill_time"))]
    for (cell, metric), values in measured.groupby(["cell", "metric"], sort=False)["value"]:
        match = CELL.fullmatch(str(cell))
        if match is None:
            continue
        sequences, tokens = (int(match[name].replace(",", "")) for name in ("sequences", "tokens"))
        seconds = float(values.median()) / 1000
        if metric == "step_time":
            yield Point(f"decode, {cell}", (geometry.decode(tokens, sequences=sequences),), seconds)
        elif sequences == 1:
            yield Point(f"prefill, {cell}", tuple(geometry.prefill(tokens)), seconds)


def _ceiling_points(frame: pd.DataFrame, geometry: Geometry) -> Iterator[Point]:
    for _, rows in frame.groupby("run", sort=False):
        for row in read_ceiling(rows).values():
            context = row.prompt_tokens + (row.output_tokens - 1) / 2
            step = geometry.decode(context, sequences=row.sequences)
            name = sequences_cell(row.sequences, row.prompt_tokens)
            yield Point(f"decode, {name}", (step,) * row.output_tokens, row.decode_seconds)
            if row.sequences == 1:
                passes = tuple(geometry.prefill(row.prompt_tokens))
                yield Point(f"prefill, {name}", passes, row.prefill_seconds)


def calibrate(
    card: Card, points: Sequence[Point], files: Sequence[str], *, integer: bool = False
) -> Calibration:
    """Fits the three constants to what was measured on `card`.

    `integer`: the compute is wanted for quantized weights, whose kernels are others than those of F16; where
    no such file was measured, any has to do.

    Raises:
        BenchError: something was faster than the datasheet allows: another card, or another model.
    """
    decodes = [point for point in points if point.is_decode]
    launch, seconds_per_byte = _fit_decode(card, decodes)
    bandwidth = 1 / seconds_per_byte
    # one row is bound by memory: its arithmetic takes no longer than that, which is all that it tells
    shares = {1.0: [max(_share(card, point, _moved(point) / bandwidth) for point in decodes)]}
    for point in [point for point in points if point.integer == integer] or points:
        working = point.seconds - launch * sum(work.kernels for work in point.passes)
        if point.is_decode or working < (1 + MARGIN) * _moved(point) / bandwidth:
            continue
        rows = max(work.rows for work in point.passes)
        shares.setdefault(rows, []).append(_share(card, point, working))
    return Calibration(
        card=card.name,
        files=list(files),
        bandwidth_share=bandwidth / card.bandwidth,
        launch_seconds=launch,
        integer=integer,
        compute_shares=sorted((rows, median(values)) for rows, values in shares.items()),
        points=[
            f"{point.what}: {1000 * point.seconds / len(point.passes):.3f} ms a pass" for point in points
        ],
    )


def _fit_decode(card: Card, points: Sequence[Point]) -> tuple[float, float]:
    """(seconds a launch, seconds a byte): relative least squares, neither better than the datasheet's."""
    kernels = np.array([sum(work.kernels for work in point.passes) for point in points])
    n_bytes = np.array([_moved(point) for point in points])
    seconds = np.array([point.seconds for point in points])
    for point, moved in zip(points, n_bytes, strict=True):
        _check(card, point, float(moved / point.seconds / card.bandwidth), "bandwidth")
    best = 1 / card.bandwidth
    a_step = n_bytes / kernels
    if a_step.max() > APART * a_step.min():
        ones = np.ones(len(points))
        (launch, a_byte), *_ = np.linalg.lstsq(np.stack([kernels, n_bytes], 1) / seconds[:, None], ones)
        if launch < 0:
            return 0.0, float(np.median(seconds / n_bytes))
        if a_byte >= best:
            return float(launch), float(a_byte)
    return float(np.median((seconds - n_bytes * best) / kernels)), best


def _moved(point: Point) -> float:
    return sum(work.n_bytes for work in point.passes)


def _share(card: Card, point: Point, seconds: float) -> float:
    """Of the card's compute, what the point's arithmetic reached in `seconds`."""
    share = sum(work.operations for work in point.passes) / seconds / card.compute
    _check(card, point, share * card.compute / card.peak(point.integer), "compute")
    return share


def _check(card: Card, point: Point, share: float, what: str) -> None:
    if share > 1:
        raise BenchError(
            f"--calibrate: {point.what} took {1000 * point.seconds:.3g} ms, {share:.2f} of the {card.name}'s "
            f"{what}: was it another card, or another model?"
        )
