"""The gates' scores as a table and as a picture."""

from pathlib import Path

from bench.gates.result import GateScore, QualityResult
from bench.plot import PALETTE, figure
from bench.table import Cell, Table

HEADER = ("gate", "thinking", "items", "score %", "95% interval", "threshold", "baseline", "verdict")
COUNTS = ("cut", "thinking cut", "empty")
THINKING = {True: "on", False: "off", None: "default"}
COLOURS = {"pass": PALETTE[2], "fail": PALETTE[3], "undecided": PALETTE[1], None: PALETTE[6]}


def quality_table(result: QualityResult) -> Table:
    """A row a gate, and what should be known about its replies."""
    notes: list[str] = []
    for gate in result.gates:
        if gate.reference_score is not None:
            notes.append(f"{gate.gate}: in full precision {percent(gate.reference_score)} on the same items")
        if gate.truncated_thinking:
            notes.append(
                f"{gate.gate}: {gate.truncated_thinking} of {gate.items} replies were still thinking after "
                f"{gate.max_tokens:,} tokens"
            )
        if gate.retries:
            notes.append(f"{gate.gate}: {gate.retries} requests had to be sent again")
    rows = [row(gate) for gate in result.gates]
    return Table([*HEADER, *COUNTS], rows, title=f"{result.model} at {result.url}", notes=notes)


def row(gate: GateScore) -> list[Cell]:
    """One gate's cells."""
    part = "" if gate.items == gate.items_in_all else f" of {gate.items_in_all:,}"
    return [
        gate.gate,
        THINKING[gate.thinking],
        f"{gate.items:,}{part}",
        percent(gate.score),
        f"{percent(gate.low)} to {percent(gate.high)}",
        percent(gate.threshold),
        percent(gate.baseline),
        gate.verdict,
        gate.cut,
        gate.truncated_thinking,
        gate.empty,
    ]


def percent(share: float | None) -> str:
    """A share of 1 as a percentage with one decimal."""
    return "-" if share is None else f"{100 * share:.1f}"


def draw(result: QualityResult, path: Path) -> None:
    """Each gate's score with its interval, its threshold and its baseline. BenchError as `figure`."""
    with figure(path, title=f"Quality gates: {result.model}", height=1.4 + 0.7 * len(result.gates)) as axes:
        axis = axes[0]
        for place, gate in enumerate(result.gates):
            low = gate.score if gate.low is None else gate.low
            high = gate.score if gate.high is None else gate.high
            axis.errorbar(
                100 * gate.score,
                place,
                xerr=[[100 * (gate.score - low)], [100 * (high - gate.score)]],
                fmt="o",
                capsize=4,
                color=COLOURS[gate.verdict],
            )
            for value, style in ((gate.threshold, "solid"), (gate.baseline, "dotted")):
                if value is not None:
                    axis.vlines(100 * value, place - 0.35, place + 0.35, color="black", linestyle=style)
        axis.set_yticks(
            range(len(result.gates)),
            [f"{gate.gate}\n{gate.verdict or 'no threshold'}, n = {gate.items:,}" for gate in result.gates],
        )
        axis.set_ylim(len(result.gates) - 0.5, -0.5)
        axis.set_xlabel("score, % (bar: 95% interval, line: threshold, dotted: baseline)")
