"""The floor model's result file, tables and picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from bench.latency_result import CATEGORIES, Protocol
from bench.plot import PALETTE, figure
from bench.results import Record, ResultFile
from bench.roofline_calibration import Calibration
from bench.roofline_model import Terms
from bench.table import Cell, Table

CASES = ("prompt read", "prompt cached", "prompt read, drafts", "prompt cached, drafts")
TERMS = ("memory", "compute", "launch")


class Times(Record):
    """Seconds, by what they are spent on; `binds` is the largest of the three."""

    memory: float
    compute: float
    launch: float
    total: float
    binds: str

    @classmethod
    def of(cls, terms: Terms) -> Self:
        return cls(
            memory=terms.memory,
            compute=terms.compute,
            launch=terms.launch,
            total=terms.total,
            binds=terms.binding,
        )


class StepRecord(Record):
    """One kind of pass: bytes to be moved, operations, kernels; seconds on each card."""

    what: str
    n_bytes: float
    operations: float
    kernels: float
    seconds: dict[str, Times]


class Prediction(Record):
    """One category's request on one card. `first` is the first token, `rest` all others.

    `datasheet`: seconds of the whole if the card reached its datasheet's figures and launches took no time.
    """

    card: str
    category: str
    case: str
    first: Times
    rest: Times
    total: Times
    datasheet: float


class Comparison(Record):
    """A measured median (seconds) beside the predictions for its card; `cached`: most of its prompt was."""

    who: str
    card: str
    category: str
    protocol: Protocol
    cached: bool
    measured: float
    predicted: float
    predicted_with_drafts: float | None


class CardRecord(Record):
    """The figures that predictions rest on: per second, and seconds a launch."""

    name: str
    bandwidth: float
    compute: float
    vector: float
    launch: float
    compute_shares: list[tuple[float, float]]
    source: str


class RooflineResult(ResultFile):
    """The result file of ``bench.roofline``: everything in it but `comparisons[].measured` is computed."""

    kind: Literal["roofline"] = "roofline"
    gguf_bytes: int
    settings: dict[str, float | int | str]
    cards: list[CardRecord]
    calibration: Calibration | None
    steps: list[StepRecord]
    predictions: list[Prediction]
    comparisons: list[Comparison]


def label(card: str) -> str:
    """No figure of a card stands without saying what it is."""
    return f"{card} (prediction)"


def tables(result: RooflineResult) -> list[Table]:
    """What a pass moves, the floors by category, and what was measured beside them."""
    made = [steps_table(result), predictions_table(result)]
    return [*made, comparisons_table(result)] if result.comparisons else made


def steps_table(result: RooflineResult) -> Table:
    """Bytes and operations of single passes."""
    names = [card.name for card in result.cards]
    rows: list[list[Cell]] = []
    for step in result.steps:
        row: list[Cell] = [step.what, step.n_bytes / 1e9, step.operations / 1e9, round(step.kernels)]
        for name in names:
            row += [1000 * step.seconds[name].total, step.seconds[name].binds]
        rows.append(row)
    header = ["one pass", "GB", "GFLOP", "kernels"]
    for name in names:
        header += [f"{label(name)} ms", "binds"]
    return Table(header, rows, title=f"What a pass of {result.model} costs", notes=_card_notes(result))


def predictions_table(result: RooflineResult) -> Table:
    """Every category and case."""
    rows: list[list[Cell]] = [
        [
            label(line.card),
            f"{line.category}, {line.case}",
            1000 * line.first.total,
            line.first.binds,
            1000 * line.rest.total / (CATEGORIES[line.category].max_tokens - 1),
            line.rest.binds,
            1000 * line.total.total,
            line.total.binds,
            1000 * line.datasheet,
        ]
        for line in result.predictions
    ]
    header = ["card", "category", "first token ms", "binds", "per token ms", "binds", "request ms", "binds"]
    header.append("datasheet's floor ms")
    return Table(header, rows, title="One request at a time", notes=_transfer_notes(result))


def comparisons_table(result: RooflineResult) -> Table:
    """Measured and predicted side by side."""
    rows: list[list[Cell]] = [
        [
            line.who,
            f"{line.category}, {line.protocol}{', cached' if line.cached else ''}",
            1000 * line.measured,
            1000 * line.predicted,
            line.measured / line.predicted,
            None if line.predicted_with_drafts is None else 1000 * line.predicted_with_drafts,
            None if line.predicted_with_drafts is None else line.measured / line.predicted_with_drafts,
        ]
        for line in result.comparisons
    ]
    header = ["who", "category", "measured ms", "predicted ms", "ratio", "predicted with drafts ms", "ratio"]
    cards = ", ".join(dict.fromkeys(line.card for line in result.comparisons))
    return Table(header, rows, title=f"Measured on {cards}, beside the prediction")


def draw(result: RooflineResult, path: Path) -> None:
    """A panel a card: stacked bars of what a request's time goes into, measured medians as dots."""
    names = [card.name for card in result.cards]
    title = f"{result.model}: what a request's time goes into (prediction)"
    with figure(path, title=title, columns=len(names), width=4.4 * len(names) + 1, height=5) as axes:
        for axis, name in zip(axes, names, strict=True):
            lines = [line for line in result.predictions if line.card == name]
            bottom = [0.0] * len(lines)
            for colour, term in zip(PALETTE, TERMS, strict=False):
                heights = [1000 * float(getattr(line.total, term)) for line in lines]
                axis.bar(range(len(lines)), heights, 0.7, bottom=bottom, color=colour, label=term)
                bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
            points = [
                (at, 1000 * seen.measured)
                for at, line in enumerate(lines)
                for seen in result.comparisons
                if _matches(line, seen)
            ]
            if points:
                axis.plot([x for x, _ in points], [y for _, y in points], "ko", ms=4, label="measured")
            labels = [f"{line.category}, {line.case}" for line in lines]
            axis.set_xticks(range(len(lines)), labels, rotation=60, ha="right", fontsize=7.5)
            axis.set_title(f"{label(name)}, ms")
            axis.grid(axis="x", visible=False)
        axes[0].legend()


def _matches(line: Prediction, seen: Comparison) -> bool:
    case = CASES[1] if seen.cached else CASES[0]
    return (line.card, line.category, line.case) == (seen.card, seen.category, case)


def _transfer_notes(result: RooflineResult) -> Sequence[str]:
    fit = result.calibration
    if fit is None or all(card.name == fit.card for card in result.cards):
        return []
    return [
        f"other cards than the {fit.card}: the same share of the bandwidth, the same launches, and the "
        "compute reached in proportion to F32 rates, which no measurement has confirmed"
    ]


def _card_notes(result: RooflineResult) -> Sequence[str]:
    notes = [
        f"{card.name}: {card.bandwidth / 1e9:,.0f} GB/s, {card.compute / 1e12:,.0f} TFLOPS, "
        f"{1e6 * card.launch:.2f} us a launch ({card.source})"
        for card in result.cards
    ]
    if result.calibration is None:
        return [*notes, "datasheet figures, no launch times: a floor that no engine reaches (--calibrate)"]
    fit = result.calibration
    shares = ", ".join(f"{100 * share:.1f}% at {rows:g} rows" for rows, share in fit.compute_shares)
    return [
        *notes,
        f"calibrated on the {fit.card} with {', '.join(fit.files)}: {100 * fit.bandwidth_share:.0f}% of the "
        f"bandwidth, {1e6 * fit.launch_seconds:.2f} us a launch; of the compute {shares}",
    ]
