"""The OpenTelemetry spans that a collector receives."""

import logging
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from qwen_serve.server.api.observe.tracing import configured_tracer
from tests.server.api.conftest import Start
from tests.waiting import wait_until

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The spans that arrive at the OTLP endpoint of the environment."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            request = ExportTraceServiceRequest.FromString(body)
            spans.extend(s for r in request.resource_spans for c in r.scope_spans for s in c.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    yield spans
    server.shutdown()
    server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


def test_a_request_is_a_span_with_its_phases(start: Start, collected: list[Any]) -> None:
    server = start("Hello there")
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    parent = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    answer = server.http.post("/v1/chat/completions", json=body, headers=parent)
    wait_until(lambda: any(span.name == "POST /v1/chat/completions" for span in collected))
    [span] = [span for span in collected if span.name == "POST /v1/chat/completions"]
    assert span.trace_id.hex() == TRACE, "the client's trace goes on"
    told = attributes(span)
    usage = answer.json()["usage"]
    assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert told["qwen.request.id"] == answer.headers["x-request-id"]
    assert span.end_time_unix_nano > span.start_time_unix_nano
    assert {s.name for s in collected if s.parent_span_id == span.span_id} <= {"queue", "prefill", "decode"}


def test_a_refusal_is_one_too(start: Start, collected: list[Any]) -> None:
    start("x").chat(temperature=-1)
    wait_until(lambda: bool(collected))
    told = attributes(collected[0])
    assert told["http.response.status_code"] == 400
    assert "temperature" in told["error.message"]


def test_none_is_configured(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    assert configured_tracer() is None
    assert not caplog.messages
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with caplog.at_level(logging.WARNING):
        assert configured_tracer() is None
    assert "pip install 'qwen-serve[otel]'" in caplog.text
