"""Around every request: the API key, the count of requests in flight, a log line, the request metrics."""

from __future__ import annotations

import hmac
import logging
import time
from typing import TYPE_CHECKING

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers

from server.api.errors import ApiError
from server.api.tenant import key_of, sent_key

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from server.api.service import Service

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/ping", "/health", "/metrics"})
"""Answered without the API key, for probes and scrapers; not counted as work that a shutdown waits for."""

CLIENT_LEFT = 499


class Watch:
    """Counts, times and logs requests."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        status = CLIENT_LEFT
        complete = False

        async def watched(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        started = time.perf_counter()
        sent_key.set(key_of(Headers(scope=scope)))
        self._service.in_flight += 1
        try:
            await self._app(scope, receive, watched)
        except Exception:
            # the handler for what nobody foresaw sits outside of this and answers 500
            status, complete = 500, True
            raise
        finally:
            self._service.in_flight -= 1
            seconds = time.perf_counter() - started
            shown = status if complete else CLIENT_LEFT
            logger.info("%s %s %d %.0f ms", scope["method"], scope["path"], shown, seconds * 1000)
            # unknown paths share a label: a scanner must not grow the metrics without bound
            route = scope.get("route")
            endpoint = getattr(route, "path", "other")
            self._service.metrics.requests.labels(endpoint, str(shown)).inc()
            self._service.metrics.duration.observe(seconds)


class RequireKey:
    """Answers 401 unless the request carries `Authorization: Bearer <key>`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = Headers(scope=scope).get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, self._expected):
                error = ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
                answer = JSONResponse(error.body(), 401, headers={"WWW-Authenticate": "Bearer"})
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)
