"""What every request passes: API key, count of requests in flight, request id, log line, metrics."""

import hmac
import logging
import time
from collections.abc import Collection, Sequence

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qwen_serve.server.api.context import RequestContext, context_of
from qwen_serve.server.api.error_response import error_response
from qwen_serve.server.api.errors import ApiError
from qwen_serve.server.api.observe.record import shown_path
from qwen_serve.server.api.observe.tracing import Tracer
from qwen_serve.server.api.page import is_page
from qwen_serve.server.api.service import Service

logger = logging.getLogger(__name__)

PROBES = frozenset({"/ping", "/health"})
OPEN_PATHS = PROBES | {"/metrics"}
"""Paths of probes and scrapers; shutdown does not wait for them."""

CLIENT_LEFT = 499

REQUEST_ID = b"x-request-id"


def is_open(path: str) -> bool:
    """Whether a path needs no key and does not count as work: probes, metrics, and the chat page's files."""
    return path in OPEN_PATHS or is_page(path)


class RequestLogMiddleware:
    """Counts, times, logs and traces requests; each has an id, the client's own or a new one."""

    def __init__(self, app: ASGIApp, service: Service, tracer: Tracer | None = None) -> None:
        self._app = app
        self._service = service
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = RequestContext(Request(scope, receive), self._service)
        try:
            if is_open(scope["path"]):
                await self._app(scope, receive, send)
            else:
                await self._watched(context, send)
        finally:
            del scope["state"]["context"]  # breaks a cycle that only the garbage collector would free

    async def _watched(self, context: RequestContext, send: Send) -> None:
        scope, receive = context.http.scope, context.http.receive
        status = CLIENT_LEFT
        begun = complete = False

        async def watched(message: Message) -> None:
            nonlocal status, begun, complete
            if message["type"] == "http.response.start":
                status, begun = message["status"], True
                headers = [*message.get("headers", ()), (REQUEST_ID, context.id.encode())]
                message = {**message, "headers": headers}
            await send(message)
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        started = time.perf_counter()
        self._service.in_flight += 1
        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if begun:
                status, complete = 500, True
                raise
            # answered here, because Starlette would raise again, and uvicorn then closes the connection, on
            # which the client's next request may have arrived
            logger.exception("request %s failed", context.id)
            answer = await error_response(context.http, error)
            await answer(scope, receive, watched)
        finally:
            self._service.in_flight -= 1
            # a wrong request does not keep the model loaded
            if context.needs_model and not 400 <= status < CLIENT_LEFT:
                self._service.last_work = time.monotonic()
            seconds = time.perf_counter() - started
            shown = status if complete else CLIENT_LEFT
            what = f"{scope['method']} {shown_path(scope)} {shown}"
            logger.info("%s", context.record.line(what, seconds, context.id))
            if self._tracer is not None:
                self._tracer.trace(context, shown, seconds)
            # unknown paths share a label, so that a scanner cannot grow the metrics without limit
            route = scope.get("route")
            endpoint = getattr(route, "path", "other")
            self._service.metrics.requests.labels(endpoint, str(shown)).inc()
            self._service.metrics.duration.observe(seconds)


class RequireKey:
    """Answers 401 unless a request has one of the keys, as `Authorization: Bearer <key>` or `X-Api-Key`. The
    `unlocked` paths and the chat page's files need no key."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], unlocked: Collection[str]) -> None:
        self._app = app
        self._unlocked = unlocked
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and path not in self._unlocked and not is_page(path):
            headers = Headers(scope=scope)
            scheme, _, token = headers.get("authorization", "").partition(" ")
            bearer = token.strip() if scheme.lower() == "bearer" else ""
            if not self._known(bearer) and not self._known(headers.get("x-api-key", "")):
                error = ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
                context_of(scope).record.error = error
                answer = JSONResponse(error.body_for(path), 401, headers={"WWW-Authenticate": "Bearer"})
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _known(self, given: str) -> bool:
        """Whether `given` is one of the keys, compared in constant time."""
        return sum(hmac.compare_digest(given.encode("latin-1"), key) for key in self._keys) > 0
