"""Prometheus metrics: requests as they end, and the engine's own counters."""

from collections.abc import Iterable, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from qwen_serve.server.chat import TextGeneration
from qwen_serve.server.engine import TIERS, EngineStats
from qwen_serve.server.engine.profile import PHASES

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
PER_TOKEN_SECONDS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1)

COUNTERS = {
    "preemptions": "Sequences that lost their slot or their KV cells to others for a while",
    "prefix.hits": "Requests that continued from a checkpoint of the prefix cache",
    "prefix.misses": "Requests for which the prefix cache had no checkpoint",
    "prefix.tokens_saved": "Prompt tokens that came from the prefix cache",
    "prefix.checkpoints": "Checkpoints taken",
    "prefix.evictions": "Checkpoints evicted from the device",
    "prefix.restores": "Checkpoints restored from host memory",
    "prefix.failed_copies": "Copies of checkpoints to or from host memory that failed",
    "images.encoded": "Images that were encoded",
    "images.cached": "Images that were found in the cache and not encoded again",
}
"""Counters of EngineStats; each metric has its field's name."""

GAUGES = {
    "prefix.resident": "Checkpoints on the device",
    "prefix.resident_cells": "KV cells that only checkpoints occupy",
    "prefix.resident_bytes": "Bytes that checkpoints occupy on the device",
    "prefix.host_checkpoints": "Checkpoints in host memory",
    "prefix.host_bytes": "Bytes of the checkpoints in host memory",
    "images.bytes": "Bytes of encoded images, held by requests or cached",
}
"""Gauges of EngineStats."""

LOAD = {
    "qwen_running_sequences": ("running", "Sequences being decoded"),
    "qwen_waiting_sequences": ("waiting", "Sequences in the queue"),
    "qwen_kv_cells_used": ("kv_cells_used", "Used cells of the KV cache, in tokens"),
    "qwen_kv_cells": ("kv_cells", "All cells of the KV cache, in tokens"),
}
"""Metric -> field of EngineStats, for gauges that exist at zero before the engine is loaded."""

Labels = tuple[tuple[str, str], ...]

disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """One server's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._engine = EngineCollector()
        self._registry.register(self._engine)
        ProcessCollector(registry=self._registry)
        self.requests = Counter(
            "qwen_requests",
            "HTTP requests that were answered; status 499: the client disconnected first",
            ("endpoint", "status"),
            registry=self._registry,
        )
        self.duration = self._histogram(
            "qwen_request_seconds", "Time from the request to the end of its response", SECONDS
        )
        self._prompt_tokens = self._counter("qwen_prompt_tokens", "Prompt tokens of ended generations")
        self._cached_tokens = self._counter(
            "qwen_cached_prompt_tokens", "Prompt tokens that came from the prefix cache"
        )
        self._image_tokens = self._counter("qwen_image_prompt_tokens", "Prompt tokens that stand for images")
        self._completion_tokens = self._counter("qwen_completion_tokens", "Output tokens")
        self._finished = Counter(
            "qwen_generations",
            "Generations, by the reason of their end",
            ("reason",),
            registry=self._registry,
        )
        self._queue = self._by_tier("qwen_queue_seconds", "Time from submission to the first step")
        self._ttft = self._by_tier(
            "qwen_time_to_first_token_seconds", "Time from submission to the first token"
        )
        self._tpot = self._histogram(
            "qwen_time_per_output_token_seconds",
            "Mean time of a token after the first, by generation",
            PER_TOKEN_SECONDS,
        )

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self._registry)

    def _by_tier(self, name: str, text: str) -> Histogram:
        made = Histogram(name, text, ("service_tier",), buckets=SECONDS, registry=self._registry)
        for tier in TIERS:
            made.labels(tier)  # present from the start, at zero
        return made

    def observe(self, generation: TextGeneration) -> None:
        """Counts a generation that has ended, or was cancelled."""
        self._prompt_tokens.inc(generation.request.prompt_length)
        self._cached_tokens.inc(generation.request.cached_tokens)
        self._image_tokens.inc(generation.request.pictures.n_rows)
        self._completion_tokens.inc(generation.completion_tokens)
        reason = generation.finish_reason
        self._finished.labels(reason if reason in ("stop", "length") else "unfinished").inc()
        timings = generation.request.timings
        tier = generation.request.scheduling.service_tier
        if timings.started:
            self._queue.labels(tier).observe(timings.queue_ms / 1000)
        if timings.first_token:
            self._ttft.labels(tier).observe(timings.first_token - timings.submitted)
        if timings.finished and generation.completion_tokens > 1:
            self._tpot.observe(timings.decode_ms / 1000 / (generation.completion_tokens - 1))

    def render(self, stats: EngineStats | None) -> bytes:
        """The text format. `stats` are the engine's, None before it is loaded."""
        self._engine.stats = stats or self._engine.stats
        return generate_latest(self._registry)

    def pause(self, stats: EngineStats) -> None:
        """Records the last `stats` of an engine that is unloaded: gauges are 0 until `resume`, and the next
        engine's counters add to these."""
        self._engine.stats = stats
        self._engine.pause()

    def resume(self) -> None:
        """Shows gauges again, once an engine is loaded."""
        self._engine.paused = False


class EngineCollector(Collector):
    """Exports the latest `stats`, or LOAD alone before there are any. Counters continue across engines."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = None
        self.paused = False
        self._ended: dict[str, dict[Labels, float]] = {}
        """Each counter's sum over engines that have ended."""

    def pause(self) -> None:
        """Adds the engine's counters to the sums of those before it."""
        counters = [metric for metric in self.collect() if isinstance(metric, CounterMetricFamily)]
        self._ended = {metric.name: _values(metric) for metric in counters}
        self.paused = True

    def describe(self) -> Iterable[Metric]:
        """Empty: the metrics depend on the engine."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        for metric in self._running():
            if isinstance(metric, CounterMetricFamily):
                ended, counted = self._ended.get(metric.name, {}), {} if self.paused else _values(metric)
                metric.samples = []
                for labels in ended | counted:
                    value = ended.get(labels, 0) + counted.get(labels, 0)
                    metric.samples.append(Sample(f"{metric.name}_total", dict(labels), value))
            elif self.paused:
                metric.samples = [sample._replace(value=0) for sample in metric.samples]
            yield metric

    def _running(self) -> Iterator[Metric]:
        """The engine's own counters."""
        stats = self.stats
        for name, (field, text) in LOAD.items():
            yield GaugeMetricFamily(name, text, value=_value(stats, field) if stats else 0)
        if stats is None:
            return
        for field, text in COUNTERS.items():
            yield CounterMetricFamily(_name(field), text, value=_value(stats, field))
        for field, text in GAUGES.items():
            yield GaugeMetricFamily(_name(field), text, value=_value(stats, field))
        yield from _tiers(stats)
        yield from _drafts(stats)
        yield from _steps(stats)


def _values(metric: Metric) -> dict[Labels, float]:
    return {tuple(sample.labels.items()): sample.value for sample in metric.samples}


def _name(field: str) -> str:
    return "qwen_" + field.replace(".", "_")


def _value(stats: EngineStats, field: str) -> float:
    value: object = stats
    for part in field.split("."):
        value = getattr(value, part)
    assert isinstance(value, int | float)
    return value


def _tiers(stats: EngineStats) -> Iterator[Metric]:
    """Each service tier's queue and cost. A tier's share is the rate of its cost divided by that of all
    tiers."""
    labels = ("service_tier",)
    waiting = GaugeMetricFamily("qwen_waiting_requests", "Requests in the queue", labels=labels)
    cost = CounterMetricFamily(
        "qwen_served_cost", "Cost of requests, in units of the time of a prompt token", labels=labels
    )
    for tier, (count, served) in stats.tiers.items():
        waiting.add_metric((tier,), count)
        cost.add_metric((tier,), served)
    yield from (waiting, cost)


def _drafts(stats: EngineStats) -> Iterator[Metric]:
    """Each drafter's counters. The mean accepted length is accepted tokens divided by verifications."""
    labels = ("drafter",)
    steps = CounterMetricFamily("qwen_draft_verifications", "Drafts that were verified", labels=labels)
    drafted = CounterMetricFamily("qwen_drafted_tokens", "Drafted tokens", labels=labels)
    accepted = CounterMetricFamily(
        "qwen_accepted_draft_tokens", "Drafted tokens that were accepted", labels=labels
    )
    failed = CounterMetricFamily("qwen_drafts_failed", "Drafts lost to an error", labels=labels)
    unready = CounterMetricFamily(
        "qwen_drafts_unready",
        "Drafts not made because the drafter lacked the hidden states that it reads",
        labels=labels,
    )
    active = GaugeMetricFamily(
        "qwen_drafter_active", "1 while the drafter drafts, 0 in a cooldown", labels=labels
    )
    for drafter, counts in stats.drafts.items():
        steps.add_metric((drafter,), counts.steps)
        drafted.add_metric((drafter,), counts.drafted)
        accepted.add_metric((drafter,), counts.accepted)
        failed.add_metric((drafter,), counts.failed)
        unready.add_metric((drafter,), counts.unready)
        active.add_metric((drafter,), int(counts.state == "active"))
    yield from (steps, drafted, accepted, failed, unready, active)


def _steps(stats: EngineStats) -> Iterator[Metric]:
    """Time of the steps by phase. `rows` is the number of rows sampled, rounded up to a power of two."""
    labels = ("kind", "rows")
    steps = CounterMetricFamily("qwen_steps", "Steps of the engine", labels=labels)
    tokens = CounterMetricFamily("qwen_step_tokens", "Tokens in the batches of steps", labels=labels)
    seconds = CounterMetricFamily("qwen_step_seconds", "Time of steps, by phase", labels=(*labels, "phase"))
    for totals in stats.step_totals:
        values = totals.kind, str(totals.rows)
        steps.add_metric(values, totals.steps)
        tokens.add_metric(values, totals.tokens)
        for phase, spent in zip(PHASES, totals.seconds, strict=True):
            seconds.add_metric((*values, phase), spent)
    yield from (steps, tokens, seconds)
