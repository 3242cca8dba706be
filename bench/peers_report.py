"""A comparison of peers as tables and as a picture.

    python bench/peers_report.py RESULT.json ...

prints the tables of result files as Markdown.
"""

import argparse
import sys
from pathlib import Path

from bench.latency_result import CATEGORIES, PROTOCOLS, Protocol, by_key, mean_speedup
from bench.options import HelpFormatter, run
from bench.peers_result import MEAN, Figure, Measured, PeersResult, at_once
from bench.peers_steps import step_table
from bench.plot import PALETTE, figure
from bench.table import Cell, Table, show

LONGEST_NAME = 16  # of a reference that fits into a column's header


def tables(result: PeersResult) -> list[Table]:
    """Each protocol or the levels, the engine's ceiling, our server's steps, and who took part."""
    made: list[Table] = []
    if result.workload == "latency":
        made += [table for protocol in PROTOCOLS if (table := latency_table(result, protocol)) is not None]
    elif any(one.levels for one in result.measured):
        made.append(level_table(result))
    if result.ceiling is not None:
        made.append(ceiling_table(result))
    steps = step_table(result)
    return [*made, *([steps] if steps is not None else []), peer_table(result)]


def latency_table(result: PeersResult, protocol: Protocol) -> Table | None:
    """A line a peer: medians by category, their mean, and against whom; None when nothing was measured."""
    names = [name for name in [*CATEGORIES, MEAN] if _has(result, f"{name}, {protocol}")]
    rows: list[list[Cell]] = []
    for one in result.measured:
        if not any(line.protocol == protocol for line in one.summaries):
            continue
        figures = {name: _figure(result, one.peer, f"{name}, {protocol}") for name in names}
        last = figures[names[-1]]
        row: list[Cell] = [one.peer, *(found.value if found else None for found in figures.values())]
        row += [
            last.ratio if last else None,
            _percent(last.ceiling_share if last else None),
            _percent(_cached(one, protocol)),
            _same(one, protocol),
        ]
        if result.baseline is not None:
            row.append(mean_speedup(one.summaries)[protocol])
        rows.append(row)
    if not rows:
        return None
    header = ["peer", *(f"{name} ms" for name in names), _against(result)]
    header += ["of ceiling", "cached", "same answers"]
    notes = [
        f"ratio to {result.reference} and share of the ceiling: of the {names[-1]}; above 1 is faster",
        "same answers: texts equal to the reference's, of those sent both",
    ]
    if result.baseline is not None:
        header.append("score")
        notes.append(f"score: mean over the categories of the speed-up against {result.baseline.name}")
    title = f"Latency, {protocol} protocol, {_model(result)}: medians, one request at a time"
    return Table(header, rows, title=title, notes=[*notes, *(_errors(result, protocol))])


def level_table(result: PeersResult) -> Table:
    """A line for each peer and level."""
    rows: list[list[Cell]] = []
    by_round = any(figure.round_ratio is not None for figure in result.figures)
    concurrencies = dict.fromkeys(level.concurrency for one in result.measured for level in one.levels)
    for concurrency in concurrencies:
        for one in result.measured:
            levels = [level for level in one.levels if level.concurrency == concurrency]
            found = _figure(result, one.peer, at_once(result.workload, concurrency))
            if found is None:
                continue
            level = sorted(levels, key=lambda level: level.output_rate)[len(levels) // 2]
            rows.append(
                [
                    f"{concurrency}, {one.peer}",
                    found.value,
                    found.ratio,
                    *([found.round_ratio] if by_round else []),
                    _percent(found.ceiling_share),
                    level.latency.p50,
                    1000 * level.first_token.p50 if level.first_token else None,
                    1000 * level.per_token.p50 if level.per_token else None,
                    _percent(level.cached_share),
                    sum(level.errors for level in levels),
                ]
            )
    header = ["level, peer", "output tok/s", _against(result), *(["by round"] if by_round else [])]
    header += ["of ceiling", "latency p50 s", "TTFT p50 ms", "per token ms", "cached", "errors"]
    lengths = f"{result.settings['input_tokens']} tokens in, {result.settings['output_tokens']} out"
    title = f"Throughput, {result.workload}, {lengths}, {_model(result)}"
    notes = [f"ratio to {result.reference}; above 1 is faster"]
    if by_round:
        notes.append("by round: the median of the rounds' own ratios, free of what disturbed all in a round")
    return Table(header, rows, title=title, notes=notes)


def ceiling_table(result: PeersResult) -> Table:
    """What the engine does without a server."""
    assert result.ceiling is not None
    rows: list[list[Cell]] = [
        [
            f"{row.prompt_tokens:,} in, {row.output_tokens:,} out, {row.sequences} at once",
            1000 * row.prefill_seconds,
            1000 * row.decode_seconds,
            row.output_rate,
        ]
        for row in result.ceiling.batched
    ]
    raw = ", ".join(f"{row.test} {row.rate:,.0f}" for row in result.ceiling.raw)
    return Table(
        ["shape", "prefill ms", "decode ms", "output tok/s"],
        rows,
        title="The engine's ceiling (llama-batched-bench)",
        notes=[f"llama-bench, tokens/s: {raw}"],
    )


def peer_table(result: PeersResult) -> Table:
    """Who took part, how long its start took, and who dropped out."""
    rows: list[list[Cell]] = []
    notes = list(result.notes)
    for peer in result.peers:
        rows.append([peer.name, peer.program, peer.start_seconds, "FAILED" if peer.failed else "ok"])
        if peer.failed:
            notes.append(f"{peer.name} FAILED: {peer.failed}")
            if peer.log:
                notes.append(f"{peer.name}: log in {peer.log}")
    return Table(["peer", "program", "start s", "state"], rows, title="Peers", notes=notes)


def draw(result: PeersResult, path: Path) -> None:
    """Horizontal bars, a panel for each protocol's mean or each level; the ceiling is a dashed line."""
    wanted = [f"{MEAN}, {protocol}" for protocol in PROTOCOLS]
    if result.workload != "latency":
        levels = dict.fromkeys(level.concurrency for one in result.measured for level in one.levels)
        wanted = [at_once(result.workload, level) for level in levels]
    panels = [name for name in wanted if _has(result, name)]
    if not panels:  # not all categories were run
        panels = list(dict.fromkeys(found.what for found in result.figures))
    if not panels:
        return
    names = [one.peer for one in result.measured]
    height = 1.2 + 0.34 * len(names)
    title = f"{_model(result)}: {result.workload}, peers in turns"
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    with figure(
        path, title=title, rows=rows, columns=columns, width=5 * columns, height=rows * height
    ) as axes:
        for axis, name in zip(axes, panels, strict=False):
            found = [_figure(result, peer, name) for peer in names]
            values = [one.value if one else 0.0 for one in found]
            colours = [PALETTE[0] if peer == result.reference else PALETTE[5] for peer in names]
            bars = axis.barh(range(len(names)), values, color=colours)
            axis.bar_label(bars, [_label(one) for one in found], padding=3, fontsize=8)
            ceiling = next((one.ceiling for one in found if one and one.ceiling), None)
            if ceiling is not None:
                axis.axvline(ceiling, color=PALETTE[3], linestyle="--", zorder=0.5)
                axis.set_xlabel(f"dashed: the bare engine, {show(ceiling)}", color=PALETTE[3])
            unit = next(one.unit for one in found if one)
            axis.set_title(f"{name}, {unit} ({'lower' if unit == 'ms' else 'higher'} is better)")
            axis.set_yticks(range(len(names)), names)
            axis.invert_yaxis()
            axis.grid(axis="y", visible=False)
            axis.margins(x=0.22)
        for axis in axes[len(panels) :]:
            axis.set_visible(False)


def _label(found: Figure | None) -> str:
    if found is None:
        return "not measured"
    return f"{show(found.value)} (x{found.ratio:.2f})" if found.ratio else show(found.value)


def _figure(result: PeersResult, peer: str, what: str) -> Figure | None:
    return next((one for one in result.figures if (one.peer, one.what) == (peer, what)), None)


def _has(result: PeersResult, what: str) -> bool:
    return any(found.what == what for found in result.figures)


def _cached(one: Measured, protocol: Protocol) -> float | None:
    lines = by_key(one.summaries)
    longest = [lines[name, protocol] for name in CATEGORIES if (name, protocol) in lines]
    return longest[-1].cached_share if longest else None


def _same(one: Measured, protocol: Protocol) -> str | None:
    pairs = [pair for name, pair in one.same_answers.items() if name.endswith(f", {protocol}")]
    return f"{sum(same for same, _ in pairs)}/{sum(of for _, of in pairs)}" if pairs else None


def _errors(result: PeersResult, protocol: Protocol) -> list[str]:
    return [
        f"{one.peer}, {line.category}: {line.errors} requests FAILED and are left out"
        for one in result.measured
        for line in one.summaries
        if line.errors and line.protocol == protocol
    ]


def _against(result: PeersResult) -> str:
    return f"x {result.reference}" if len(result.reference) <= LONGEST_NAME else "x reference"


def _percent(share: float | None) -> str | None:
    return f"{100 * share:.0f}%" if share is not None else None


def _model(result: PeersResult) -> str:
    return Path(result.gguf).stem if result.gguf else result.model or "the model"


def show_files(args: argparse.Namespace) -> int:
    """The tables of each file, as Markdown, on stdout."""
    for path in args.results:
        print("\n".join(table.markdown() for table in tables(PeersResult.load(path))))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python bench/peers_report.py", description=__doc__, formatter_class=HelpFormatter
    )
    made.add_argument(
        "results", nargs="+", type=Path, metavar="RESULT.json", help="written by bench/peers.py"
    )
    return made


if __name__ == "__main__":
    sys.exit(run(parser(), show_files))
