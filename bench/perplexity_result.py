"""What `bench.perplexity` found, as its result file, its table and its picture."""

from pathlib import Path
from typing import Literal

from bench.plot import PALETTE, figure
from bench.results import Record, ResultFile
from bench.table import Cell, Table

FEW_TOKENS = 10_000  # below, the last hundredth of the tokens is fewer than a hundred


class Estimate(Record):
    """A mean and its standard error, which is taken over chunks, tokens of one text being alike."""

    value: float
    error: float | None


class Kld(Record):
    """KL(reference || model) in nats, over tokens: the mean and quantiles."""

    mean: Estimate
    median: float
    p90: float
    p99: float
    p999: float
    maximum: float


class Histogram(Record):
    """`counts` of tokens between neighbouring `edges` in nats; `zero`: those below the first edge."""

    edges: list[float]
    counts: list[int]
    zero: int


class PerplexityResult(ResultFile):
    """The result file of ``bench.perplexity``; ``model`` and ``reference`` are file names.

    ``tokens`` were scored, in ``chunks`` of ``context`` tokens whose first ``skip`` are read only.
    ``text_tokens`` and ``reference_text_tokens``: the whole text as either model's own tokenizer cuts it.
    ``dropped``: the mean probability the reference gives to tokens that the model does not have.
    """

    kind: Literal["perplexity"] = "perplexity"
    reference: str
    text: str
    text_sha256: str
    bytes: int
    reference_bytes: int
    context: int
    skip: int
    chunks: int
    tokens: int
    text_tokens: int
    reference_text_tokens: int
    perplexity: Estimate
    reference_perplexity: Estimate
    log_ratio: Estimate
    kld: Kld
    same_top: Estimate
    dropped: float
    histogram: Histogram


def tables(result: PerplexityResult) -> list[Table]:
    """One table: a row a figure."""
    kld = result.kld
    rows: list[list[Cell]] = [
        ["perplexity", digits(result.perplexity.value, 4), error(result.perplexity, 4)],
        [
            "  of the reference",
            digits(result.reference_perplexity.value, 4),
            error(result.reference_perplexity, 4),
        ],
        ["  ln(model / reference)", digits(result.log_ratio.value), error(result.log_ratio)],
        ["KL divergence, mean nats", digits(kld.mean.value), error(kld.mean)],
        ["  median", digits(kld.median), None],
        ["  90%", digits(kld.p90), None],
        ["  99%", digits(kld.p99), None],
        ["  99.9%", digits(kld.p999), None],
        ["  most", digits(kld.maximum), None],
        ["same first choice, %", digits(100 * result.same_top.value, 2), error(result.same_top, 2, 100)],
    ]
    notes = [f"{result.bytes / 1e6:,.2f} MB; the reference has {result.reference_bytes / 1e6:,.2f} MB"]
    if result.text_tokens != result.reference_text_tokens:
        longer = 100 * (result.text_tokens / result.reference_text_tokens - 1)
        notes += [
            f"the reference gives {100 * result.dropped:.4f}% to tokens that the model does not have; "
            "divergence is over the others",
            f"the text is {result.text_tokens:,} tokens here, {result.reference_text_tokens:,} there "
            f"({longer:+.2f}%); both read the former",
        ]
    title = (
        f"{result.model} against {result.reference}: {result.tokens:,} tokens of {result.text}, "
        f"{result.chunks} x {result.context}, the first {result.skip} of each unscored"
    )
    return [Table(["figure", "value", "+-"], rows, title=title, notes=[*notes, *result.notes])]


def digits(value: float, places: int = 5) -> str:
    """A figure with a fixed number of decimals."""
    return f"{value:.{places}f}"


def error(estimate: Estimate, places: int = 5, scale: float = 1) -> Cell:
    """A standard error as a cell."""
    return None if estimate.error is None else digits(scale * estimate.error, places)


def draw(result: PerplexityResult, path: Path) -> None:
    """Two panels: how many tokens lie how far from the reference, and the share that lies further."""
    kld, bars = result.kld, result.histogram
    marks = (("median", kld.median, "-"), ("mean", kld.mean.value, "--"), ("99%", kld.p99, ":"))
    title = f"{result.model}: KL divergence from {result.reference}, token by token"
    with figure(path, title=title, columns=2, width=11, height=4) as (left, right):
        left.stairs(bars.counts, bars.edges, fill=True, color=PALETTE[0], alpha=0.8)
        further = [sum(bars.counts[i:]) / result.tokens for i in range(len(bars.counts) + 1)]
        right.plot(bars.edges[:-1], further[:-1], color=PALETTE[0])
        right.set_yscale("log")
        for axis in (left, right):
            axis.set_xscale("log")
            axis.set_xlabel("nats")
            for (name, value, style), colour in zip(marks, PALETTE[1:], strict=False):
                if value >= bars.edges[0]:
                    axis.axvline(value, color=colour, linestyle=style, label=f"{name} {value:.2g}")
        left.set_title(f"Tokens ({bars.zero:,} below {bars.edges[0]:.0e} not shown)")
        right.set_title("Share of tokens further away than")
        left.legend(loc="upper left")
