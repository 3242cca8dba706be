"""A client's request: its body, a JSON object of bounded size, and whether the client still waits."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from server.api.errors import ApiError, ClientLeft, bad_request, from_validation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fastapi import Request

    from server.api.service import Service

Schema = TypeVar("Schema", bound=BaseModel)
Result = TypeVar("Result")

LARGE_JSON = 128 * 1024
LONG_TEXT = 4 * 1024
"""Bytes from which on a body is decoded, or its text tokenised, off the event loop: a millisecond or two that
every stream would wait for. Below, the way to a thread and back costs as much as the work."""


async def off_loop(work: Callable[[], Result], size: int, limit: int = LONG_TEXT) -> Result:
    """`work()`, on a worker thread where there are `limit` bytes of work or more."""
    return await asyncio.to_thread(work) if size >= limit else work()


async def body_of(http: Request, service: Service) -> tuple[dict[str, Any], int]:
    """The body, and its size in bytes; refused unread while the service has no model to answer with."""
    _ = service.backend
    return await read_json(http, service.settings.max_body_mib * 1024**2)


async def read_json(request: Request, max_bytes: int) -> tuple[dict[str, Any], int]:
    """The body as an object, and its size in bytes. Raises ApiError 400, 413 and 415."""
    check_content_type(request.headers.get("content-type"))
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise ApiError(415, f"content-encoding {encoding} is not supported", code="unsupported_media_type")
    body = await read(request, max_bytes)
    try:
        decoded = await off_loop(lambda: from_json(body, allow_inf_nan=False), len(body), LARGE_JSON)
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}", None, "invalid_json") from error
    if not isinstance(decoded, dict):
        raise bad_request("the body must be a JSON object", None, "invalid_json")
    return decoded, len(body)


async def validate(schema: type[Schema], body: dict[str, Any], size: int) -> Schema:
    """`body` as `schema`. Raises ApiError 400."""
    try:
        return await off_loop(lambda: schema.model_validate(body), size, LARGE_JSON)
    except ValidationError as error:
        raise from_validation(error) from error


def check_content_type(header: str | None) -> None:
    """Raises ApiError 415 unless the header is absent or names JSON in UTF-8."""
    if header is None:
        return
    media, _, parameters = header.lower().partition(";")
    media = media.strip()
    if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
        raise ApiError(
            415, f"content-type must be application/json, not {media}", code="unsupported_media_type"
        )
    charset = parameters.partition("charset=")[2].strip(' "')
    if charset not in ("", "utf-8", "utf8", "us-ascii"):
        raise ApiError(415, f"the body must be UTF-8, not {charset}", code="unsupported_media_type")


async def read(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises ApiError 413 as soon as it is known to be longer than `max_bytes`."""
    too_large = ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                raise too_large
    except ClientDisconnect as error:
        raise ClientLeft from error
    return bytes(body)


async def until_gone(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled when the client disconnects. Raises ClientLeft then.

    The request must have been read.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while not gone:
            gone = (await request.receive())["type"] == "http.disconnect"
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise ClientLeft from None
        raise
    finally:
        watcher.cancel()
