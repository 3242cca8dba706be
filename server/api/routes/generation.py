"""The endpoints that generate: /v1/completions, /v1/chat/completions and /invocations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from server.api.body import body_of, documented, validate
from server.api.chat import chat
from server.api.completion import complete
from server.api.errors import bad_request
from server.api.schemas import ChatRequest, CompletionRequest
from server.api.service import service_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


class PlainRoute(APIRoute):
    """For endpoints that take the request and return a response: FastAPI has nothing to find out for them."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The endpoint itself."""
        return self.endpoint


router = APIRouter(route_class=PlainRoute)


@router.post("/v1/completions", openapi_extra=documented(CompletionRequest))
async def completions(http: Request) -> Response:
    """Continue a prompt: no template, no thinking."""
    service = service_of(http)
    body, size = await body_of(http, service)
    return await complete(http, service, await validate(CompletionRequest, body, size), size)


@router.post("/v1/chat/completions", openapi_extra=documented(ChatRequest))
async def chat_completions(http: Request) -> Response:
    """Answer a conversation."""
    service = service_of(http)
    body, size = await body_of(http, service)
    return await chat(http, service, await validate(ChatRequest, body, size), size)


@router.post("/invocations", openapi_extra=documented(CompletionRequest, ChatRequest))
async def invocations(http: Request) -> Response:
    """A `prompt` is continued, `messages` are answered; the temperature is 0 where none is given."""
    service = service_of(http)
    body, size = await body_of(http, service)
    prompted, conversed = body.get("prompt") is not None, body.get("messages") is not None
    if prompted == conversed:
        param = "messages" if prompted else "prompt"
        raise bad_request("give either prompt or messages" + ", not both" * prompted, param, "invalid_value")
    if body.get("temperature") is None:
        body["temperature"] = 0.0
    if prompted:
        return await complete(http, service, await validate(CompletionRequest, body, size), size)
    return await chat(http, service, await validate(ChatRequest, body, size), size)
