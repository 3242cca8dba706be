"""A gate's score: written to the store, and read from it."""

from dataclasses import dataclass
from typing import Any, Self

import pandas as pd

from qwen_serve.bench.gates.estimate import Paired
from qwen_serve.bench.gates.gate import Verdict, verdict

WORKLOAD, SUBTASKS = "gates", "subtasks"
"""The store's workloads: a cell for each gate, and one for each subtask of a gate with several."""

SHARES = ("score", "low", "high", "threshold", "baseline", "reference_score")
METRIC_OF = {
    "score": "score",
    "low": "score_low",
    "high": "score_high",
    "threshold": "threshold",
    "baseline": "baseline",
    "reference_score": "reference_score",
    "lost": "lost_items",
    "gained": "gained_items",
    "items": "items",
    "items_in_all": "items_in_all",
    "cut": "cut_answers",
    "truncated_thinking": "cut_thinking",
    "empty": "empty_answers",
    "retries": "retries",
    "seconds": "seconds",
}
"""The metric of each field; shares of 1 are stored as percentages."""


@dataclass(frozen=True, slots=True)
class GateScore:
    """A gate's score and how it came about. Scores are shares of 1; ``low`` and ``high`` bound 95%.

    ``cut``: replies that reached the token limit; ``truncated_thinking``: those of them that were still
    thinking; ``empty``: replies without an answer. ``reference_score``: of the recorded full-precision model
    on the same items; ``lost`` and ``gained``: items that only it, or only this model, got right.
    """

    gate: str
    items: int
    items_in_all: int
    score: float
    low: float | None
    high: float | None
    threshold: float | None = None
    baseline: float | None = None
    reference_score: float | None = None
    lost: int | None = None
    gained: int | None = None
    cut: int = 0
    truncated_thinking: int = 0
    empty: int = 0
    retries: int = 0
    seconds: float = 0.0

    @property
    def paired(self) -> Paired | None:
        """Item by item against the recorded full-precision model; None without a record."""
        return None if self.lost is None or self.gained is None else Paired(self.lost, self.gained)

    @property
    def verdict(self) -> Verdict | None:
        """Whether the score reaches the threshold; None without one."""
        if self.threshold is None:
            return None
        low, high = (self.score if end is None else end for end in (self.low, self.high))
        return verdict(self.score, low, high, self.threshold, complete=self.items == self.items_in_all)

    def values(self) -> dict[str, float]:
        """The values for a row of the store."""
        known = {field: getattr(self, field) for field in METRIC_OF}
        return {
            METRIC_OF[field]: 100 * value if field in SHARES else value
            for field, value in known.items()
            if value is not None
        }

    @classmethod
    def of_values(cls, gate: str, values: dict[str, float]) -> Self:
        """The inverse of `values`."""
        known = {field: values[metric] for field, metric in METRIC_OF.items() if metric in values}
        shares = {field: known[field] / 100 if field in known else None for field in SHARES}
        counts = {field: int(value) for field, value in known.items() if field not in (*SHARES, "seconds")}
        fields: dict[str, Any] = {**shares, **counts}
        return cls(gate=gate, **fields, seconds=known.get("seconds", 0.0))


def gate_scores(rows: pd.DataFrame) -> list[GateScore]:
    """Every gate of one subject in one run's rows, in the order in which they were asked."""
    asked = rows[rows["workload"] == WORKLOAD]
    return [
        GateScore.of_values(str(gate), dict(zip(of_gate["metric"], of_gate["value"], strict=True)))
        for gate, of_gate in asked.groupby("cell", sort=False)
    ]
