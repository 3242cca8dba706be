"""What a card really reaches, from measurements of the same engine: bandwidth, compute by rows, launch time.

Measurements are result files: of `bench.peers` with the engine's own ceiling (llama-batched-bench and
llama-bench), or of `bench.latency`, streamed, of a server that does not speculate. Two of models of different
sizes tell the bandwidth from the launches; from one alone, the bandwidth is taken as the datasheet's and all
the rest as launches.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from bench.errors import BenchError
from bench.latency_result import CATEGORIES, LatencyResult
from bench.peers_result import PeersResult
from bench.results import Record
from bench.roofline_model import CARDS, Card, Geometry, Work, preset_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

APART = 1.3  # how much more bytes one decode step must move than another to tell bandwidth from launches
ONE_PIECE = 1.1  # more tokens than this in a streamed piece: the server speculates
MARGIN = 0.05  # by which a phase must be slower than its memory to be bound by the compute
UNCACHED = 0.1  # cached share of the prompt up to which its first token counts as a prefill


@dataclass(frozen=True)
class Point:
    """A measured phase: its passes and their time together."""

    what: str
    passes: tuple[Work, ...]
    seconds: float

    @property
    def is_decode(self) -> bool:
        return all(work.rows == 1 for work in self.passes)


class Calibration(Record):
    """Shares of the datasheet's figures that were reached on `card`, and seconds a kernel's launch takes."""

    card: str
    files: list[str]
    bandwidth_share: float
    launch_seconds: float
    compute_shares: list[tuple[float, float]]
    points: list[str]

    def apply(self, card: Card) -> Card:
        """A card that is used as well as this one was.

        The same share of its bandwidth, the same launches, and of the compute the same rates in proportion to
        the cards' F32 rates (multiprocessors times clock: what feeds the tensor cores), up to its own.
        """
        measured = CARDS[self.card]
        scale = measured.compute / card.compute * card.vector / measured.vector
        return replace(
            card,
            bandwidth=card.bandwidth * self.bandwidth_share,
            launch=self.launch_seconds,
            compute_shares=tuple((rows, min(1.0, share * scale)) for rows, share in self.compute_shares),
        )


def card_of(path: Path, named: str | None) -> Card:
    """The preset that the measurement's card is. Raises BenchError when it is none and none is `named`."""
    try:
        recorded = json.loads(path.read_bytes()).get("card") or ""
    except (OSError, ValueError, AttributeError) as error:
        raise BenchError(f"--calibrate {path}: cannot be read: {error}") from error
    if card := preset_of(named or recorded):
        return card
    raise BenchError(
        f"--calibrate {path}: measured on {named or recorded or 'no card'!r}; "
        f"say which of {', '.join(CARDS)} that is with --calibrate-card"
    )


def read_points(path: Path, geometry: Geometry) -> list[Point]:
    """The phases that a result file tells of a model. Raises BenchError: none, or another kind of file."""
    try:
        kind = json.loads(path.read_bytes()).get("kind")
    except (OSError, ValueError, AttributeError) as error:
        raise BenchError(f"--calibrate {path}: cannot be read: {error}") from error
    if kind == "peers":
        points = list(_ceiling_points(PeersResult.load(path), geometry))
    elif kind == "latency":
        points = list(_latency_points(LatencyResult.load(path), geometry, path))
    else:
        raise BenchError(f"--calibrate {path}: kind {kind!r}; want a result of bench.peers or bench.latency")
    if not any(point.is_decode for point in points):
        raise BenchError(
            f"--calibrate {path}: no decode of a single sequence in it; want bench.peers with its ceiling "
            "(--ceiling) or bench.latency with streamed runs and distinct prompts"
        )
    return points


def _ceiling_points(result: PeersResult, geometry: Geometry) -> Iterator[Point]:
    if result.ceiling is None:
        return
    for row in result.ceiling.batched:
        context = row.prompt_tokens + (row.output_tokens - 1) / 2
        step = geometry.decode(context, sequences=row.sequences)
        name = f"{row.prompt_tokens}/{row.output_tokens} x {row.sequences}"
        yield Point(f"decode {name}", (step,) * row.output_tokens, row.decode_seconds)
        if row.sequences == 1:
            yield Point(f"prefill {name}", tuple(geometry.prefill(row.prompt_tokens)), row.prefill_seconds)
    for test in result.ceiling.raw:
        if test.test.startswith("pp"):
            tokens = int(test.test[2:])
            yield Point(f"prefill {tokens}", tuple(geometry.prefill(tokens)), tokens / test.rate)


def _latency_points(result: LatencyResult, geometry: Geometry, path: Path) -> Iterator[Point]:
    for line in result.summaries:
        if line.protocol != "distinct" or line.first_token is None or line.per_token is None:
            continue
        if line.tokens_per_arrival is not None and line.tokens_per_arrival > ONE_PIECE:
            raise BenchError(
                f"--calibrate {path}: {line.tokens_per_arrival:.1f} tokens in a piece: this server "
                "speculates; want a run with speculation switched off"
            )
        category = CATEGORIES[line.category]
        step = geometry.decode(category.prompt_tokens + category.max_tokens / 2)
        yield Point(f"decode {line.category}", (step,), line.per_token.p50)
        if (line.cached_share or 0.0) <= UNCACHED:
            passes = tuple(geometry.prefill(category.prompt_tokens))
            yield Point(f"prefill {line.category}", passes, line.first_token.p50)


def calibrate(card: Card, points: Sequence[Point], files: Sequence[str]) -> Calibration:
    """Fits the three constants to what was measured on `card`.

    Raises:
        BenchError: something was faster than the datasheet allows: another card, or another model.
    """
    decodes = [point for point in points if point.is_decode]
    launch, seconds_per_byte = _fit_decode(card, decodes)
    bandwidth = 1 / seconds_per_byte
    # one row is bound by memory: its arithmetic takes no longer than that, which is all that it tells
    shares = {1.0: [max(_share(card, point, _moved(point) / bandwidth) for point in decodes)]}
    for point in points:
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
    _check(card, point, share, "compute")
    return share


def _check(card: Card, point: Point, share: float, what: str) -> None:
    if share > 1:
        raise BenchError(
            f"--calibrate: {point.what} took {1000 * point.seconds:.3g} ms, {share:.2f} of the {card.name}'s "
            f"{what}: was it another card, or another model?"
        )
