"""One request's state, passed from the first middleware to the engine."""

import re
from collections.abc import Container
from typing import cast
from uuid import uuid4

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import Scope

from qwen_serve.server.api.observe.record import RequestRecord
from qwen_serve.server.api.service import Service

GIVEN_ID = re.compile(r"[\x21-\x7e]{1,128}")
"""Client ids that are accepted: printable ASCII, safe in a header and a log."""


class RequestContext:
    """Created by `RequestLogMiddleware`. The ASGI scope has it until the route; from there on it is an
    argument."""

    def __init__(self, http: Request, service: Service) -> None:
        given = http.headers.get("x-request-id", "")
        self.http, self.service = http, service
        self.id = given if GIVEN_ID.fullmatch(given) else uuid4().hex
        """The client's own `X-Request-Id`, or a new one; echoed in that header."""
        self.key = key_of(http.headers, service.keys)
        """The API key that the request carries, whether or not the server requires one."""
        self.body = service.bodies.begin()
        self.needs_model = False
        """Whether this request needs the loaded model."""
        self.record = RequestRecord()
        http.scope.setdefault("state", {})["context"] = self


def context_of(scope: Scope) -> RequestContext:
    """The context of the request that `scope` belongs to."""
    return cast("RequestContext", scope["state"]["context"])


def key_of(headers: Headers, known: Container[str]) -> str:
    """The key in `Authorization` or, from Anthropic's clients, in `x-api-key`. If both are present, the one
    that is valid."""
    bearer = headers.get("authorization", "").partition(" ")[2].strip()
    sent = [key for key in (bearer, headers.get("x-api-key", "")) if key]
    return next((key for key in sent if key in known), sent[0] if sent else "")
