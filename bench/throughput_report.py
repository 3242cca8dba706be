"""The throughput result as tables and as a picture."""

from pathlib import Path

from bench.measures import Spread
from bench.plot import PALETTE, figure
from bench.table import Cell, Table, show
from bench.throughput_result import ThroughputResult


def tables(result: ThroughputResult) -> list[Table]:
    """Both tables; the second only for conversations."""
    turns = turn_table(result)
    return [level_table(result)] if turns is None else [level_table(result), turns]


def level_table(result: ThroughputResult) -> Table:
    """One line a concurrency level."""
    rows: list[list[Cell]] = [
        [
            str(level.concurrency),
            level.requests,
            level.errors,
            level.output_rate,
            level.total_rate,
            *_percentiles(level.latency, 1),
            *_percentiles(level.first_token, 1000),
            1000 * level.per_token.p50 if level.per_token else None,
            f"{100 * level.cached_share:.0f}%" if level.cached_share is not None else None,
            f"{level.spot_checks_passed}/{level.spot_checks}",
        ]
        for level in result.levels
    ]
    header = ["level", "requests", "errors", "output tok/s", "total tok/s", "latency p50 s", "p90", "p99"]
    header += ["TTFT p50 ms", "p90", "p99", "per token ms", "cached", "spot checks"]
    title = f"Throughput of {result.model or 'the model'} at {result.url}{result.endpoint}, {result.workload}"
    return Table(header, rows, title=title, notes=_notes(result))


def turn_table(result: ThroughputResult) -> Table | None:
    """How conversations fare as they grow; None for workloads of one turn."""
    if not any(turn.turn for turn in result.turns):
        return None
    rows: list[list[Cell]] = [
        [
            f"{turn.concurrency}, turn {turn.turn + 1}",
            turn.prompt_tokens,
            f"{100 * turn.cached_share:.0f}%" if turn.cached_share is not None else None,
            *_percentiles(turn.first_token, 1000),
            *_percentiles(turn.latency, 1),
        ]
        for turn in result.turns
    ]
    header = ["level", "prompt tokens", "cached", "TTFT p50 ms", "p90", "p99", "latency p50 s", "p90", "p99"]
    return Table(header, rows, title="By turn of the conversation")


def draw(result: ThroughputResult, path: Path) -> None:
    """Output rate, latency and first-token time against concurrency; for chats the first token by turn."""
    levels = result.levels
    x = [level.concurrency for level in levels]
    by_turn = any(turn.turn for turn in result.turns)
    title = f"{result.model or 'model'}: {result.workload}, {result.settings['input_tokens']} tokens in, "
    title += f"{result.settings['output_tokens']} out"
    rows, columns = (2, 2) if by_turn else (1, 3)
    with figure(path, title=title, rows=rows, columns=columns, width=4 * columns, height=4 * rows) as axes:
        axes[0].plot(x, [level.output_rate for level in levels], "o-", color=PALETTE[0])
        for level in levels:
            axes[0].annotate(
                show(level.output_rate),
                (level.concurrency, level.output_rate),
                xytext=(0, 6),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
        axes[0].set_title("Output tokens per second, verified")
        panels = (
            (axes[1], "Request latency, s", [level.latency for level in levels], 1),
            (axes[2], "Time to first token, ms", [level.first_token for level in levels], 1000),
        )
        for axis, label, spreads, unit in panels:
            known = [(at, spread) for at, spread in zip(x, spreads, strict=True) if spread is not None]
            for colour, name in ((PALETTE[0], "p50"), (PALETTE[1], "p90"), (PALETTE[3], "p99")):
                heights = [unit * float(getattr(spread, name)) for _, spread in known]
                axis.plot([at for at, _ in known], heights, "o-", color=colour, label=name)
            axis.set_title(label)
            if known:
                axis.legend()
        for axis in axes[:3]:
            axis.set_xscale("log", base=2)
            axis.set_xticks(x, [str(at) for at in x])
            axis.margins(x=0.08)
            axis.set_ylim(0, 1.12 * axis.dataLim.y1)
            axis.set_xlabel("concurrent requests")
        if by_turn:
            for index, level in enumerate(levels):
                turns = [t for t in result.turns if t.concurrency == level.concurrency and t.first_token]
                axes[3].plot(
                    [t.turn + 1 for t in turns],
                    [1000 * t.first_token.p50 for t in turns if t.first_token],
                    "o-",
                    color=PALETTE[index % len(PALETTE)],
                    label=f"{level.concurrency} at once",
                )
            axes[3].set_title("Time to first token by turn, ms (p50)")
            axes[3].set_xlabel("turn")
            axes[3].set_xticks(sorted({turn.turn + 1 for turn in result.turns}))
            axes[3].set_ylim(0, 1.12 * axes[3].dataLim.y1)
            axes[3].legend()


def _percentiles(spread: Spread | None, unit: float) -> list[Cell]:
    return [None] * 3 if spread is None else [unit * spread.p50, unit * spread.p90, unit * spread.p99]


def _notes(result: ThroughputResult) -> list[str]:
    notes = [f"output tokens counted by {result.token_counts}; prompts: {result.settings['prompts']}"]
    for level in result.levels:
        at = f"level {level.concurrency}"
        if level.stopped_early:
            notes.append(f"{at}: {level.stopped_early} answers stopped before the asked length")
        if level.miscounted:
            claimed, verified = level.claimed_output_tokens, level.verified_output_tokens
            notes.append(
                f"{at}: {level.miscounted} answers re-count to other lengths than claimed "
                f"({claimed:,} claimed, {verified:,} verified)"
            )
    notes += [
        f"level {check.level}: spot check FAILED: {check.question!r} got {check.answer!r}"
        for check in result.spot_checks
        if not check.passed
    ]
    if result.score is not None:
        if result.score.protocol:
            notes.append(f"score: {result.score.value:,.0f}")
        else:
            why = "; ".join(result.score.deviations)
            notes.append(f"weighted sum {result.score.value:,.0f}, not a score of the protocol: {why}")
    return notes + result.notes
