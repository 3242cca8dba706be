"""A gate's score: written to the store, and read from it."""

from dataclasses import dataclass
from typing import Any, Self

import pandas as pd

from qwen_serve.bench.gates.estimate import Paired
from qwen_serve.bench.gates.gate import Verdict, verdict

WORKLOAD, SUBTASKS = "gates", "subtasks"
"""The store's workloads: with a cell for each gate, and with one for each subtask of a gate that has
several."""

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
"""Field of `GateScore` -> metric of the store, where shares of 1 are percentages."""


@dataclass(frozen=True, slots=True)
class GateScore:
    """A gate's score. Scores are shares of 1; ``low`` and ``high``: the 95% interval.

    ``cut``: replies that reached the token limit; ``truncated_thinking``: those that reached it while
    thinking; ``empty``: replies without an answer. ``reference_score``: the full-precision model's on the
    same items; ``lost``: items that only that model got right; ``gained``: items that only this one did.
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
        """The comparison with the full-precision model, item by item; None if its outcomes are not
        recorded."""
        return None if self.lost is None or self.gained is None else Paired(self.lost, self.gained)

    @property
    def verdict(self) -> Verdict | None:
        """Whether the score reaches the threshold; None without a threshold."""
        if self.threshold is None:
            return None
        low, high = (self.score if end is None else end for end in (self.low, self.high))
        return verdict(self.score, low, high, self.threshold, complete=self.items == self.items_in_all)

    def values(self) -> dict[str, float]:
        """Values by metric, for the store."""
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
    """The gates of one subject in one run's rows, in the order of measurement."""
    asked = rows[rows["workload"] == WORKLOAD]
    return [
        GateScore.of_values(str(gate), dict(zip(of_gate["metric"], of_gate["value"], strict=True)))
        for gate, of_gate in asked.groupby("cell", sort=False)
    ]
