"""One request's state, passed from the middleware that sees it first to the engine's door."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, cast
from uuid import uuid4

from qwen_serve.server.api.observe.record import RequestRecord
from qwen_serve.server.api.tenant import key_of

if TYPE_CHECKING:
    from fastapi import Request
    from starlette.types import Scope

    from qwen_serve.server.api.service import Service

GIVEN_ID = re.compile(r"[\x21-\x7e]{1,128}")
"""Ids of clients that are taken over: printable ASCII, so that they can stand in a header and a log."""


class RequestContext:
    """Begun by `Watch`. ASGI hands it to the route in the scope; from there on it is an argument."""

    def __init__(self, http: Request, service: Service) -> None:
        given = http.headers.get("x-request-id", "")
        self.http, self.service = http, service
        self.id = given if GIVEN_ID.fullmatch(given) else uuid4().hex
        """The client's own `X-Request-Id`, or made up; echoed in that header."""
        self.key = key_of(http.headers, service.keys)
        """The API key that it came with, whether or not one is asked for."""
        self.body = service.bodies.begin()
        self.needs_model = False
        """Whether the model is, or would be, loaded for it."""
        self.record = RequestRecord()
        http.scope.setdefault("state", {})["context"] = self


def context_of(scope: Scope) -> RequestContext:
    """That of the request which `scope` is of."""
    return cast("RequestContext", scope["state"]["context"])
