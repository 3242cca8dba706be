"""/metrics: Prometheus' text format."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from server.api.service import service_of

router = APIRouter()


@router.get("/metrics")
async def metrics(http: Request) -> Response:
    """Counters since the start; gauges as of now."""
    service = service_of(http)
    stats = service.loaded.engine.stats() if service.loaded else None
    return Response(service.metrics.render(stats), media_type=CONTENT_TYPE_LATEST)
