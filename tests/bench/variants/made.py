"""Made-up stores of finished sweeps."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from qwen_serve.bench.gates.score import WORKLOAD, GateScore
from qwen_serve.bench.report.perplexity import WORKLOAD as DIVERGENCE
from qwen_serve.bench.report.sweep import FILE, WEIGHTS
from qwen_serve.bench.store import Results, Run, load
from qwen_serve.bench.variants.weights import EVERY_POSITION

CELLS = {
    (protocol, cell): factor
    for protocol in ("official", "distinct")
    for cell, factor in (("short", 1), ("long", 2))
}
"""The protocols and categories, and how many times as long as the short ones they take."""


def gate(
    name: str,
    score: float,
    low: float,
    high: float,
    threshold: float | None,
    items: int = 50,
    paired: tuple[int, int] | tuple[None, None] = (None, None),
) -> GateScore:
    """A gate's score on some of its 500 items; ``paired``: items lost and gained."""
    known = GateScore(name, items, 500, score, low, high, threshold=threshold, baseline=1.0, seconds=1.0)
    return replace(known, lost=paired[0], gained=paired[1])


@dataclass(frozen=True)
class Made:
    """A variant whose short requests take ``ms``, and long ones twice that. ``scatter``: relative standard
    deviation between rounds; ``slower``: factor by cell; ``error``: why it failed."""

    name: str
    ms: float
    gates: Sequence[GateScore] = ()
    scatter: float = 0.0
    bits: float = 4.5
    error: str | None = None
    slower: dict[tuple[str, str], float] = field(default_factory=dict)


def swept(
    store: Path, *variants: Made, rounds: int = 8, baseline: str | dict[str, float] = "first", seed: int = 0
) -> Results:
    """A sweep over these variants, with all rounds finished."""
    rng = random.Random(seed)
    settings = {"source": "models/m", "variants": [one.name for one in variants], "baseline": baseline}
    with Run.begin(store, "sweep", settings=settings, local=False) as run:
        for one in variants:
            run.describe(one.name, error=one.error)
            if one.error is not None:
                continue
            run.add(one.name, WEIGHTS, FILE, 1, {"size": one.bits, "bits_per_weight": one.bits})
            kld = {"kld_mean": 1 / one.bits**3, "kld_p99": 10 / one.bits**3, "scored_tokens": 1000.0}
            run.add(one.name, DIVERGENCE, EVERY_POSITION, 1, kld)
            for score in one.gates:
                run.add(one.name, WORKLOAD, score.gate, 1, score.values())
            for number in range(1, rounds + 1):
                for (protocol, cell), factor in CELLS.items():
                    ms = one.ms * factor * one.slower.get((protocol, cell), 1.0)
                    run.add(
                        one.name, protocol, cell, number, {"latency": ms * rng.lognormvariate(0, one.scatter)}
                    )
    return load([run.folder])
