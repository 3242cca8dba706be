"""The latency result as tables and as a picture."""

from pathlib import Path
from statistics import mean

from bench.latency_result import CATEGORIES, PROTOCOLS, LatencyResult, Protocol, Summary, by_key
from bench.measures import Spread
from bench.plot import PALETTE, figure
from bench.table import Cell, Table, show

COLOURS: dict[Protocol, str] = {"official": PALETTE[0], "distinct": PALETTE[1]}


def tables(result: LatencyResult) -> list[Table]:
    """Both tables; the second only when something was streamed."""
    streamed = stream_table(result)
    return [latency_table(result)] if streamed is None else [latency_table(result), streamed]


def latency_table(result: LatencyResult) -> Table:
    """Both protocols side by side; a protocol that was not run stands as dashes."""
    lines = by_key(result.summaries)
    rows: list[list[Cell]] = []
    for name in dict.fromkeys(line.category for line in result.summaries):
        official, distinct = (lines.get((name, protocol)) for protocol in PROTOCOLS)
        category = CATEGORIES[name]
        rows.append(
            [
                name,
                f"{category.prompt_tokens:,} / {category.max_tokens}",
                *_latency_cells(official),
                *_latency_cells(distinct),
            ]
        )
    if len(rows) > 1:
        means: list[Cell] = []
        for protocol in PROTOCOLS:
            means += [_mean_ms(result, protocol), None, result.speedup[protocol], None]
        rows.append(["mean", "", *means])
    header = ["category", "in / out"]
    for protocol in PROTOCOLS:
        header += [f"{protocol} ms", "p10-p90", "speed-up", "cached"]
    return Table(
        header,
        rows,
        title=f"Latency of {result.model or 'the model'} at {result.url}{result.endpoint}, "
        "one request at a time, medians",
        notes=_notes(result),
    )


def stream_table(result: LatencyResult) -> Table | None:
    """First-token time and time per output token; None when nothing was streamed."""
    rows: list[list[Cell]] = [
        [
            f"{line.category}, {line.protocol}",
            *_percentiles(line.first_token),
            *_percentiles(line.per_token),
            _ms(line.gap.p99) if line.gap else None,
            line.tokens_per_arrival,
        ]
        for line in result.summaries
        if line.first_token is not None
    ]
    if not rows:
        return None
    header = ["category", "TTFT p50", "p90", "p99", "per token p50", "p90", "p99", "gap p99", "tokens/piece"]
    return Table(header, rows, title=f"Streamed from {result.stream_endpoint}, milliseconds")


def draw(result: LatencyResult, path: Path) -> None:
    """Three panels: request latency, time to first token, time per output token; whiskers from p10 to p90."""
    panels = (
        ("Request latency, ms (lower is better)", [line.latency for line in result.summaries]),
        ("Time to first token, ms", [line.first_token for line in result.summaries]),
        ("Time per output token, ms", [line.per_token for line in result.summaries]),
    )
    names = list(dict.fromkeys(line.category for line in result.summaries))
    title = f"{result.model or 'model'}: latency, one request at a time"
    with figure(path, title=title, columns=3, width=12, height=4) as axes:
        for axis, (label, spreads) in zip(axes, panels, strict=True):
            for offset, protocol in enumerate(PROTOCOLS):
                points = [
                    (names.index(line.category) + 0.4 * offset - 0.2, spread)
                    for line, spread in zip(result.summaries, spreads, strict=True)
                    if line.protocol == protocol and spread is not None
                ]
                if not points:
                    continue
                heights = [1000 * spread.p50 for _, spread in points]
                whiskers = [
                    [1000 * (spread.p50 - spread.p10) for _, spread in points],
                    [1000 * (spread.p90 - spread.p50) for _, spread in points],
                ]
                bars = axis.bar(
                    [x for x, _ in points],
                    heights,
                    0.38,
                    yerr=whiskers,
                    error_kw={"elinewidth": 1, "ecolor": "#444444"},
                    color=COLOURS[protocol],
                    label=protocol,
                )
                axis.bar_label(bars, [show(height) for height in heights], padding=2, fontsize=8)
            axis.set_title(label)
            axis.set_xticks(range(len(names)), [_axis_label(name) for name in names])
            axis.grid(axis="x", visible=False)
            axis.margins(y=0.12)
        axes[0].legend(title="protocol")


def _axis_label(name: str) -> str:
    category = CATEGORIES[name]
    return f"{name}\n{category.prompt_tokens:,} / {category.max_tokens}"


def _latency_cells(line: Summary | None) -> list[Cell]:
    if line is None or line.latency is None:
        return [None, None, None, None]
    cached = f"{100 * line.cached_share:.0f}%" if line.cached_share is not None else None
    low, high = (f"{1000 * value:,.3g}" if value < 0.1 else f"{1000 * value:,.0f}" for value in
                 (line.latency.p10, line.latency.p90))  # fmt: skip
    return [_ms(line.latency.p50), f"{low}-{high}", line.speedup, cached]


def _percentiles(spread: Spread | None) -> list[Cell]:
    return [None] * 3 if spread is None else [_ms(spread.p50), _ms(spread.p90), _ms(spread.p99)]


def _mean_ms(result: LatencyResult, protocol: Protocol) -> float | None:
    medians = [line.latency.p50 for line in result.summaries if line.protocol == protocol and line.latency]
    return _ms(mean(medians)) if medians else None


def _ms(seconds: float) -> float:
    return 1000 * seconds


def _notes(result: LatencyResult) -> list[str]:
    notes = [f"official: repeated filler, the same prompt every time; distinct: {result.prompts}"]
    if result.baseline is not None:
        notes.append(f"speed-up against {result.baseline.name}; only a ratio on one card compares software")
    for line in result.summaries:
        wanted = CATEGORIES[line.category].max_tokens
        where = f"{line.protocol} {line.category}"
        if line.completion_tokens is not None and line.completion_tokens < wanted:
            notes.append(f"{where}: stopped early, {line.completion_tokens:.0f} of {wanted} tokens (median)")
        wanted = CATEGORIES[line.category].prompt_tokens
        if line.protocol == "distinct" and line.prompt_tokens not in (None, wanted):
            notes.append(f"{where}: the server counts {line.prompt_tokens:.0f} prompt tokens, not {wanted}")
        if line.miscounted:
            notes.append(
                f"{where}: {line.miscounted} answers re-count to other lengths than the usage claims"
            )
        if line.errors:
            notes.append(f"{where}: {line.errors} requests FAILED and are left out")
    return notes + result.notes
