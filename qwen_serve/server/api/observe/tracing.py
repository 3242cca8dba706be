"""OpenTelemetry: one span a request, with its phases, if an OTLP endpoint is configured.

The exporter reads the standard variables such as OTEL_EXPORTER_OTLP_ENDPOINT. Names are those of
OpenTelemetry's semantic conventions for HTTP and for generative AI.
"""

import logging
import os
import time
from typing import Any

from qwen_serve.server.api.context import RequestContext

logger = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class Tracer:
    """Sends spans on a thread of its own. Raises ImportError without the extra `otel`."""

    def __init__(self, exporter: Any = None) -> None:
        from opentelemetry import propagate
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter()
        named = os.environ.get("OTEL_SERVICE_NAME", "qwen-serve")
        self._provider = TracerProvider(resource=Resource.create({"service.name": named}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("qwen-serve")
        self._extract = propagate.extract

    def trace(self, context: RequestContext, status: int, seconds: float) -> None:
        """Records a request that has just ended, as a child of the span in its `traceparent`."""
        from opentelemetry import trace
        from opentelemetry.trace import SpanKind, Status, StatusCode

        scope, record = context.http.scope, context.record
        # the engine's times are perf_counter's; spans need nanoseconds since 1970
        epoch = time.time() - time.perf_counter()
        now = time.perf_counter()

        def moment(seconds: float) -> int:
            return int((epoch + seconds) * 1e9)

        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        route = getattr(scope.get("route"), "path", "other")
        span = self._tracer.start_span(
            f"{scope['method']} {route}",
            context=self._extract(carrier),
            kind=SpanKind.SERVER,
            start_time=moment(now - seconds),
            attributes={
                "http.request.method": scope["method"],
                "http.route": route,
                "http.response.status_code": status,
                "qwen.request.id": context.id,
            },
        )
        if record.error is not None:
            span.set_status(Status(StatusCode.ERROR if status >= 500 else StatusCode.UNSET))
            span.set_attribute("error.type", record.error.code or str(record.error.status))
            span.set_attribute("error.message", record.error.message)
        if (answers := record.answers) is not None:
            reasons = [g.finish_reason or "unfinished" for g in answers.generations]
            span.set_attributes(
                {
                    "gen_ai.response.id": answers.id,
                    "gen_ai.request.model": answers.model,
                    "gen_ai.response.finish_reasons": reasons,
                    "gen_ai.usage.input_tokens": answers.prompt_tokens,
                    "gen_ai.usage.cache_read.input_tokens": answers.cached_tokens,
                    "qwen.usage.image_tokens": answers.image_tokens,
                    "gen_ai.usage.output_tokens": answers.completion_tokens,
                }
            )
            if (first := answers.first_token_s) is not None:
                span.set_attribute("gen_ai.server.time_to_first_token", first)
            context = trace.set_span_in_context(span)
            for index, generation in enumerate(answers.generations):
                t = generation.request.timings
                phases = {"queue": (t.submitted, t.started), "prefill": (t.started, t.first_token)}
                phases["decode"] = (t.first_token, t.finished)
                for name, (start, end) in phases.items():
                    if start and end:
                        phase = self._tracer.start_span(
                            name,
                            context=context,
                            start_time=moment(start),
                            attributes={"qwen.choice": index},
                        )
                        phase.end(moment(end))
        span.end(moment(now))

    def close(self) -> None:
        """Sends the remaining spans."""
        self._provider.shutdown()


def configured_tracer() -> Tracer | None:
    """A tracer if the environment names an endpoint; without the packages, None and a warning."""
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return None
    try:
        return Tracer()
    except ImportError:
        logger.warning(
            "%s is set, but OpenTelemetry is not installed: pip install 'qwen-serve[otel]'", ENDPOINTS[-1]
        )
        return None
