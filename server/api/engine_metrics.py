"""The engine's counters, as Prometheus sees them: read off a snapshot when it asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from server.engine.profile import PHASES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.metrics_core import Metric

    from server.engine import EngineStats

COUNTERS = {
    "preemptions": "Sequences that gave their cells to others, and read their tokens again",
    "readout_changes": "Slots that had to be sampled in another way, which holds a step up",
    "prefix.hits": "Requests that began from a checkpoint of the prefix cache",
    "prefix.misses": "Requests that began with nothing",
    "prefix.tokens_saved": "Prompt tokens that were not computed again",
    "prefix.checkpoints": "Checkpoints taken",
    "prefix.evictions": "Checkpoints that had to leave the device",
    "prefix.restores": "Checkpoints that came back from host memory",
}
"""Fields of EngineStats that only grow."""

GAUGES = {
    "prefix.resident": "Checkpoints on the device",
    "prefix.resident_cells": "KV cells that only checkpoints occupy",
    "prefix.resident_bytes": "Bytes that checkpoints occupy on the device",
    "prefix.host_checkpoints": "Checkpoints in host memory",
    "prefix.host_bytes": "Bytes that they occupy",
}
"""Fields of EngineStats that come and go."""


class EngineCollector(Collector):
    """Shows the latest `stats`; nothing before there are any."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = None

    def describe(self) -> Iterable[Metric]:
        """None are promised: what there is depends on the engine."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        stats = self.stats
        if stats is None:
            return
        for field, text in COUNTERS.items():
            yield CounterMetricFamily(_name(field), text, value=_value(stats, field))
        for field, text in GAUGES.items():
            yield GaugeMetricFamily(_name(field), text, value=_value(stats, field))
        yield from _drafts(stats)
        yield from _steps(stats)


def _name(field: str) -> str:
    return "qwen_" + field.replace(".", "_")


def _value(stats: EngineStats, field: str) -> float:
    value: object = stats
    for part in field.split("."):
        value = getattr(value, part)
    assert isinstance(value, int | float)
    return value


def _drafts(stats: EngineStats) -> Iterator[Metric]:
    """Mean accepted length: accepted tokens by verifications."""
    labels = ("drafter",)
    steps = CounterMetricFamily("qwen_draft_verifications", "Drafts that were verified", labels=labels)
    drafted = CounterMetricFamily("qwen_drafted_tokens", "Tokens guessed ahead", labels=labels)
    accepted = CounterMetricFamily("qwen_accepted_draft_tokens", "Those that were right", labels=labels)
    for drafter, counts in stats.drafts.items():
        steps.add_metric((drafter,), counts.steps)
        drafted.add_metric((drafter,), counts.drafted)
        accepted.add_metric((drafter,), counts.accepted)
    yield from (steps, drafted, accepted)


def _steps(stats: EngineStats) -> Iterator[Metric]:
    """Where the time of steps goes. `rows` is the number of rows sampled, rounded up to a power of two."""
    labels = ("kind", "rows")
    steps = CounterMetricFamily("qwen_steps", "Steps of the engine", labels=labels)
    tokens = CounterMetricFamily("qwen_step_tokens", "Tokens in their batches", labels=labels)
    seconds = CounterMetricFamily(
        "qwen_step_seconds", "Time spent on them, by what it was spent on", labels=(*labels, "phase")
    )
    for totals in stats.step_totals:
        values = totals.kind, str(totals.rows)
        steps.add_metric(values, totals.steps)
        tokens.add_metric(values, totals.tokens)
        for phase, spent in zip(PHASES, totals.seconds, strict=True):
            seconds.add_metric((*values, phase), spent)
    yield from (steps, tokens, seconds)
