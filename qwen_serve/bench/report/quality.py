"""Tables of `qwen-bench quality`."""

from collections.abc import Mapping
from typing import Any

from qwen_serve.bench.gates.score import WORKLOAD, GateScore, gate_scores
from qwen_serve.bench.store import Manifest, Results
from qwen_serve.bench.terminal import Cell, Table

HEADER = ("gate", "thinking", "items", "score %", "95% interval", "threshold", "baseline", "verdict")
PAIRED = ("lost", "gained", "p")
COUNTS = ("cut", "thinking cut", "empty")
THINKING = {True: "on", False: "off", None: "default"}


def quality_tables(results: Results) -> list[Table]:
    """A table for each run and subject, with a row for each gate and notes about the replies."""
    made: list[Table] = []
    for (run, subject), rows in results.of(workload=WORKLOAD).groupby(["run", "subject"], sort=False):
        manifest = results.manifests[str(run)]
        about = manifest.subjects.get(str(subject), {})
        made.append(_gates(gate_scores(rows), manifest, about, str(subject)))
    return made


def percent(share: float | None) -> str:
    """A share of 1 as a percentage with one decimal."""
    return "-" if share is None else f"{100 * share:.1f}"


def _gates(scores: list[GateScore], manifest: Manifest, about: Mapping[str, Any], subject: str) -> Table:
    facts: Mapping[str, Mapping[str, Any]] = about.get("gates", {})
    notes: list[str] = []
    for gate in scores:
        if gate.reference_score is not None:
            note = f"{gate.gate}: in full precision {percent(gate.reference_score)} on the same items"
            if gate.paired is not None:
                told = "worse than" if gate.paired.worse else "not shown to be worse than"
                note += f"; {told} it ({gate.paired})"
            notes.append(note)
        if gate.truncated_thinking:
            limit = facts.get(gate.gate, {}).get("max_tokens")
            notes.append(
                f"{gate.gate}: {gate.truncated_thinking} of {gate.items} replies were still thinking after "
                + (f"{limit:,} tokens" if limit else "the token limit")
            )
        if gate.retries:
            notes.append(f"{gate.gate}: {gate.retries} requests had to be sent again")
    if any(gate.paired is not None for gate in scores):
        notes.append("lost: full precision alone got it right; gained: it did not; p: McNemar's exact test")
    rows = [_row(gate, THINKING[facts.get(gate.gate, {}).get("thinking")]) for gate in scores]
    title = f"Quality of {subject} ({about.get('model') or 'its model'})"
    return Table([*HEADER, *PAIRED, *COUNTS], rows, title=title, notes=[*notes, *manifest.notes])


def _row(gate: GateScore, thinking: str) -> list[Cell]:
    part = "" if gate.items == gate.items_in_all else f" of {gate.items_in_all:,}"
    return [
        gate.gate,
        thinking,
        f"{gate.items:,}{part}",
        percent(gate.score),
        f"{percent(gate.low)} to {percent(gate.high)}",
        percent(gate.threshold),
        percent(gate.baseline),
        gate.verdict,
        gate.lost,
        gate.gained,
        None if gate.paired is None else f"{gate.paired.p_value:.2g}",
        gate.cut,
        gate.truncated_thinking,
        gate.empty,
    ]
