"""Turns exceptions that no endpoint handled into error objects over HTTP."""

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match

from qwen_serve.server.api.context import context_of
from qwen_serve.server.api.errors import ApiError, ClientLeft, from_exception
from qwen_serve.server.api.observe.record import shown_path
from qwen_serve.server.api.unsupported import unsupported_endpoint
from qwen_serve.server.chat import PromptError
from qwen_serve.server.engine import EngineDead, GenerationError, InvalidPrompt, PromptTooLong, QueueFull


async def error_response(http: Request, error: Exception) -> JSONResponse:
    """Starlette's exception handler for all exceptions."""
    answer = from_exception(error)
    if isinstance(error, HTTPException) and error.status_code == 404:
        answer = unknown_path(http)
    elif isinstance(error, HTTPException) and error.status_code == 405:
        answer = unknown_method(http)
    context_of(http.scope).record.error = answer
    return JSONResponse(answer.body_for(http.url.path), status_code=answer.status, headers=answer.headers)


def unknown_path(http: Request) -> ApiError:
    """404 with the paths that exist, or 501 for a path that other servers offer."""
    asked = f"{http.method} {shown_path(http.scope)}"
    if what := unsupported_endpoint(http.scope["path"]):
        return ApiError(501, f"{asked}: {what}", code="not_supported")
    return ApiError(404, f"{asked}: there is no such path; there are {', '.join(http.app.state.paths)}")


def unknown_method(http: Request) -> ApiError:
    """405: names the methods that the path has."""
    matching = [route for route in http.app.state.routes if route.matches(http.scope)[0] is not Match.NONE]
    allowed = ", ".join(sorted({method for route in matching for method in route.methods})) or "GET, HEAD"
    message = f"{http.method} {shown_path(http.scope)}: this method is not allowed here; use {allowed}"
    return ApiError(405, message, headers={"Allow": allowed})


def install(app: FastAPI) -> None:
    """Routes every exception through `error_response`; `RequestLogMiddleware` brings unexpected ones."""
    kinds: tuple[type[Exception], ...] = (
        ApiError,
        ClientLeft,
        HTTPException,
        RequestValidationError,
        PromptError,
        InvalidPrompt,
        PromptTooLong,
        QueueFull,
        EngineDead,
        GenerationError,
        Exception,
    )
    for kind in kinds:
        app.add_exception_handler(kind, error_response)
