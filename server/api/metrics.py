"""What `/metrics` shows, in Prometheus' text format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from server.api.engine_metrics import EngineCollector

if TYPE_CHECKING:
    from server.chat import TextGeneration
    from server.engine import EngineStats

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
PER_TOKEN_SECONDS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1)


disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """One server's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._engine = EngineCollector()
        self._registry.register(self._engine)
        self.requests = Counter(
            "qwen_requests",
            "HTTP requests answered; status 499: the client left first",
            ("endpoint", "status"),
            registry=self._registry,
        )
        self.duration = self._histogram("qwen_request_seconds", "From request to end of response", SECONDS)
        self._prompt_tokens = self._counter("qwen_prompt_tokens", "Tokens of the prompts answered")
        self._cached_tokens = self._counter("qwen_cached_prompt_tokens", "Those that were not computed again")
        self._completion_tokens = self._counter("qwen_completion_tokens", "Tokens given back")
        self._finished = Counter(
            "qwen_generations", "Generations by how they ended", ("reason",), registry=self._registry
        )
        self._queue = self._histogram("qwen_queue_seconds", "From submission to the first step", SECONDS)
        self._ttft = self._histogram(
            "qwen_time_to_first_token_seconds", "From submission to the first token", SECONDS
        )
        self._tpot = self._histogram(
            "qwen_time_per_output_token_seconds", "Mean over the tokens after the first", PER_TOKEN_SECONDS
        )
        self._running = self._gauge("qwen_running_sequences", "Sequences being decoded")
        self._waiting = self._gauge("qwen_waiting_sequences", "Sequences in the queue")
        self._cells_used = self._gauge("qwen_kv_cells_used", "KV cache cells in use, in tokens")
        self._cells = self._gauge("qwen_kv_cells", "KV cache cells there are, in tokens")

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self._registry)

    def observe(self, generation: TextGeneration) -> None:
        """Counts a generation that has ended, or that its request has given up."""
        self._prompt_tokens.inc(generation.prompt_tokens)
        self._cached_tokens.inc(generation.cached_tokens)
        self._completion_tokens.inc(generation.completion_tokens)
        reason = generation.finish_reason
        self._finished.labels(reason if reason in ("stop", "length") else "unfinished").inc()
        timings = generation.generation.timings
        if timings.started:
            self._queue.observe(timings.queue_ms / 1000)
        if timings.first_token:
            self._ttft.observe(timings.first_token - timings.submitted)
        if timings.finished and generation.completion_tokens > 1:
            self._tpot.observe(timings.decode_ms / 1000 / (generation.completion_tokens - 1))

    def render(self, stats: EngineStats | None) -> bytes:
        """The text format; the gauges stay at zero until there is an engine to ask."""
        if stats is not None:
            self._running.set(stats.running)
            self._waiting.set(stats.waiting)
            self._cells_used.set(stats.kv_cells_used)
            self._cells.set(stats.kv_cells)
            self._engine.stats = stats
        return generate_latest(self._registry)
