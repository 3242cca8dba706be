"""Results of variants, made by hand."""

from datetime import UTC, datetime
from typing import Any

from bench.gates.gate import verdict
from bench.gates.result import GateScore
from bench.latency_result import PROTOCOLS, Protocol, Summary
from bench.measures import Spread
from bench.variants.result import LatencyPart, SweepResult, VariantResult, Weights
from bench.variants.standing import advise, baseline_of, rank
from bench.variants.variant import Variant

HEAD: dict[str, Any] = {
    "command": ["bench.sweep"],
    "url": "",
    "model": "m",
    "started": datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
    "seconds": 1.0,
    "host": {"processor": "a <fast> one", "cores": "2", "memory": "4 GiB", "system": "here"},
    "card": None,
    "versions": {"python": "3"},
}
Span = tuple[float, float, float]  # score, low, high


def gate(
    name: str, score: float, low: float, high: float, threshold: float | None, items: int = 50
) -> GateScore:
    """A gate's score, its verdict as the gates' own rule has it."""
    return GateScore(
        gate=name,
        metric="exact_match,none",
        fewshot=0,
        thinking=False,
        streamed=False,
        max_tokens=8,
        items=items,
        items_in_all=500,
        score=score,
        low=low,
        high=high,
        threshold=threshold,
        baseline=1.0,
        verdict=None if threshold is None else verdict(score, low, high, threshold, complete=False),
        reference_score=None,
        cut=0,
        truncated_thinking=0,
        empty=0,
        retries=0,
        prompt_tokens=1,
        completion_tokens=1,
        seconds=1.0,
        subtasks={},
        other_metrics={},
    )


def line(category: str, protocol: Protocol, seconds: float, spread: float = 0.01) -> Summary:
    """A latency line, p10 to p90 within ``spread`` of the median."""
    low, high = seconds * (1 - spread), seconds * (1 + spread)
    return Summary(
        protocol=protocol,
        category=category,
        runs=3,
        errors=0,
        latency=Spread(p10=low, p50=seconds, p90=high, p99=high),
        speedup=None,
        prompt_tokens=64,
        completion_tokens=128,
        cached_share=None,
        miscounted=0,
        first_token=Spread(p10=0.1, p50=0.1, p90=0.1, p99=0.1),
        per_token=None,
        gap=None,
        tokens_per_arrival=None,
    )


def result(
    name: str, seconds: float, *gates: GateScore, bits: float = 4.5, spread: float = 0.01
) -> VariantResult:
    """A finished variant whose every request takes ``seconds``, the long ones twice that."""
    summaries = [
        line(category, protocol, seconds * factor, spread)
        for category, factor in (("short", 1), ("long", 2))
        for protocol in PROTOCOLS
    ]
    weights = Weights(
        file=f"m-{name}.gguf",
        bytes=int(bits * 1e6),
        sha256="0" * 64,
        bits=bits,
        divergence=1 / bits**3,
        divergence_p99=10 / bits**3,
        same_top=0.9,
        divergence_tokens=1000,
    )
    return VariantResult(
        **HEAD,
        variant=Variant(name=name, quant="Q4_K_M"),
        source="models/m",
        fingerprint="f",
        weights=weights,
        latency=LatencyPart(endpoint="/invocations", prompts="words", settings={}, summaries=summaries),
        gates=list(gates),
        stage_seconds={"latency": 2.0},
    )


def broken(name: str, error: str) -> VariantResult:
    """A variant that failed."""
    return VariantResult(
        **HEAD,
        variant=Variant(name=name, quant="Q2_K"),
        source="models/m",
        fingerprint="",
        error=error,
    )


def swept(*results: VariantResult) -> SweepResult:
    """The sweep of these, the first one that did not fail being the baseline."""
    good = [one for one in results if one.error is None]
    baseline = baseline_of(good[0]) if good else None
    standings = rank(results, baseline)
    recommended, advice = advise(results, standings)
    return SweepResult(
        **HEAD,
        source="models/m",
        baseline=baseline,
        settings={"runs": 3},
        standings=standings,
        recommended=recommended,
        advice=advice,
    )
