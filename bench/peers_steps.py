"""What our server's steps were and where their time went, from the counters that a comparison kept."""

import re
from collections import defaultdict
from collections.abc import Mapping

from bench.peers_result import Measured, PeersResult
from bench.table import Cell, Table

SAMPLE = re.compile(r"qwen_(?P<what>steps|step_tokens|step_seconds)_total\{(?P<labels>[^}]*)\}")
LABEL = re.compile(r'(\w+)="([^"]*)"')
DEVICE = ("decode", "wait")  # phases that the engine's thread spends in llama.cpp
DRAFTED, ACCEPTED = "qwen_drafted_tokens_total", "qwen_accepted_draft_tokens_total"


def step_table(result: PeersResult) -> Table | None:
    """A line for each peer of ours, part of the workload and kind of step; None without such a peer."""
    rows = [
        row
        for one in result.measured
        for part, counters in one.counters.items()
        for row in _rows(one, part, counters)
    ]
    if not rows:
        return None
    header = ["peer, part", "kind", "steps", "tokens a step", "device ms", "host ms", "drafts right"]
    notes = [
        f"device: in llama_decode and waiting for it ({' and '.join(DEVICE)}); host: all else of a step",
        "warm-ups included; drafts right: of the tokens drafted, those that were accepted",
    ]
    return Table(header, rows, title="Steps of our server, means", notes=notes)


def _rows(one: Measured, part: str, counters: Mapping[str, float]) -> list[list[Cell]]:
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for name, value in counters.items():
        if match := SAMPLE.fullmatch(name):
            labels = dict(LABEL.findall(match["labels"]))
            what = match["what"]
            if what == "step_seconds":
                what = "device" if labels["phase"] in DEVICE else "host"
            sums[labels["kind"]][what] += value
    drafted = sum(value for name, value in counters.items() if name.startswith(DRAFTED))
    accepted = sum(value for name, value in counters.items() if name.startswith(ACCEPTED))
    right = f"{100 * accepted / drafted:.0f}%" if drafted else None
    return [
        [
            f"{one.peer}: {part}",
            kind,
            round(found["steps"]),
            found["step_tokens"] / found["steps"],
            1000 * found["device"] / found["steps"],
            1000 * found["host"] / found["steps"],
            right if kind == "verify" else None,
        ]
        for kind, found in sorted(sums.items())
        if found["steps"]
    ]
