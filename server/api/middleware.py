"""Around every request: the API key, the count of requests in flight, a log line, the request metrics."""

from __future__ import annotations

import hmac
import logging
import time
from typing import TYPE_CHECKING

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers

from server.api.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    """Answers 401 unless a request carries one of the keys: `Authorization: Bearer <key>` or `X-Api-Key`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            headers = Headers(scope=scope)
            scheme, _, token = headers.get("authorization", "").partition(" ")
            bearer = token if scheme.lower() == "bearer" else ""
            if not self._known(bearer) and not self._known(headers.get("x-api-key", "")):
                error = ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
                answer = JSONResponse(
                    error.body_for(scope["path"]), 401, headers={"WWW-Authenticate": "Bearer"}
                )
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _known(self, given: str) -> bool:
        """Whether it is one of the keys, found out in a time that says nothing about which, or how nearly."""
        return sum(hmac.compare_digest(given.encode("latin-1"), key) for key in self._keys) > 0
