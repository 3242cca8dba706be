"""A client's request: its body, a JSON object of bounded size, and whether the client still waits."""

from __future__ import annotations

import asyncio
import math
import re
from email.message import Message
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from qwen_serve.server.api.errors import ApiError, ClientLeft, bad_request, from_validation
from qwen_serve.server.api.limits import PICTURE_WORK, in_thread, interruptible
from qwen_serve.server.api.picture_urls import fetch
from qwen_serve.server.api.service import unavailable
from qwen_serve.server.chat.bounded_template import TakesLong, briefly

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fastapi import Request
    from starlette.datastructures import Headers

    from qwen_serve.server.api.context import RequestContext
    from qwen_serve.server.chat.pictures import GivenPicture

Schema = TypeVar("Schema", bound=BaseModel)
Result = TypeVar("Result")

LARGE_JSON = 128 * 1024
LONG_TEXT = 4 * 1024
"""Bytes from which on a body is decoded, or its text tokenized, off the event loop: below, the way to a
thread and back costs as much as the work."""

MAX_VALUES = 2**19
"""JSON values of a body, counted by its brackets and commas: all are made with the GIL held."""

MAX_KEYS = 2**17
"""Keys of a body's objects: each is hashed and becomes a string, five times the work of a value."""

KEY = re.compile(rb"(?<!\\)(?:\\\\)*\"[ \t\r\n]*:")
"""The end of a key. A quote inside a string has a backslash before it, or another odd number of them."""

MAX_DIGITS = 2**20
"""Digits, in texts too, of a body's numbers of 19 or more: what does not fit in 64 bits is slow to make."""

LONG_NUMBER = re.compile(rb"[0-9]{19,}")

SLICE = 2**17
"""Bytes that are searched for keys or numbers with the GIL held."""


async def read_request(context: RequestContext, choose: Callable[[dict[str, Any]], type[Schema]]) -> Schema:
    """The body as the schema that `choose` names for it.

    Refused unread while the service has no model to answer with; one that sleeps is woken. Raises ApiError
    400, 413, 415, 429 and 503. A large body waits here until those before it have become prompts
    (`prepared`).
    """
    if (status := context.service.status) not in ("ready", "sleeping"):
        raise unavailable(status)
    check_media_type(context.http.headers)
    body = await received(context)
    if context.body.must_wait:
        await until_gone(context.http, context.body.wait_turn())
    if context.body.size >= LARGE_JSON:
        context.body.rest_collector()

    def work() -> Schema:
        decoded = decode(body)
        body.clear()
        try:
            return choose(decoded).model_validate(decoded)
        except ValidationError as error:
            raise from_validation(error) from error

    request = await on_thread(work, context.body.size)
    await awake(context)
    return request


async def awake(context: RequestContext) -> None:
    """Returns once there is a model, which this request needs. Raises ApiError 503, and ClientLeft."""
    context.needs_model = True
    if context.service.status == "sleeping":
        await until_gone(context.http, context.service.wake())


def decode(body: bytes | bytearray) -> dict[str, Any]:
    """The object that `body` is in JSON, or an empty one for no body. Raises ApiError 400."""
    if len(body) > MAX_VALUES and sum(map(body.count, b"[{,")) > MAX_VALUES:
        raise bad_request(f"the body has more than {MAX_VALUES:,} JSON values", None, "invalid_json")
    if body.count(b":") > MAX_KEYS and count_keys(body) > MAX_KEYS:
        raise bad_request(f"the body's objects have more than {MAX_KEYS:,} keys", None, "invalid_json")
    if len(body) > MAX_DIGITS and count_digits(body) > MAX_DIGITS:
        message = f"the body's numbers of 19 digits or more have more than {MAX_DIGITS:,} digits together"
        raise bad_request(message, None, "invalid_json")
    try:
        decoded = from_json(body or b"{}", allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}", None, "invalid_json") from error
    if not isinstance(decoded, dict):
        raise bad_request("the body must be a JSON object", None, "invalid_json")
    for field, value in decoded.items():
        if not all_finite(value):
            raise bad_request(f"{field}: a number is too large, as 1e400 would be", field, "invalid_value")
    return decoded


def count_keys(body: bytes | bytearray) -> int:
    """Keys of the objects in a JSON text, but for those that two slices share.

    A string that begins with a colon counts as one.
    """
    return sum(len(KEY.findall(body, at, at + SLICE)) for at in range(0, len(body), SLICE))


def count_digits(body: bytes | bytearray) -> int:
    """Digits of a JSON text's long numbers, but for some that two slices share."""
    return sum(
        len(number)
        for at in range(0, len(body), SLICE)
        for number in LONG_NUMBER.findall(body, at, at + SLICE)
    )


def all_finite(value: Any) -> bool:
    """Whether no number in a JSON value was too large for a float: infinity could not be written back.

    The decoder reads 1e400 as infinity, whatever `allow_inf_nan` says.
    """
    unread: list[list[Any]] = [[value]]
    while unread:
        part = unread.pop()
        kinds = set(map(type, part))
        if float in kinds and (math.inf in part or -math.inf in part):
            return False
        if dict in kinds or list in kinds:
            for inner in part:
                if isinstance(inner, dict):
                    unread.append(list(inner.values()))
                elif isinstance(inner, list):
                    unread.append(inner)
    return True


async def on_thread(work: Callable[[], Result], size: int) -> Result:
    """`work()`, which makes objects of a body of `size` bytes; on a thread where they are many."""
    return await in_thread(work, size) if size >= LARGE_JSON else work()


async def prepared(context: RequestContext, work: Callable[[Callable[[], None]], Result]) -> Result:
    """`work(interrupt)`, which makes of the request's body what is answered; on a thread if that is long.

    It may begin twice: where a template takes long on the event loop, it begins anew on a thread. From then
    on that template is rendered on threads only.

    `interrupt` raises once the client has left. Raises ClientLeft then. Whatever `work` leaves of the body is
    not counted any more.
    """
    if context.body.size < LONG_TEXT:
        try:
            with briefly():
                return work(lambda: None)
        except TakesLong:  # a template that takes its time, whatever the body
            pass
    try:
        interrupted = interruptible(work, context.body.size, context.service.bodies)
        return await until_gone(context.http, interrupted)
    finally:
        context.body.release()


async def seen(
    context: RequestContext, work: Callable[[Callable[[], None]], Result], pictures: list[GivenPicture]
) -> Result:
    """`work(interrupt)`, which decodes and encodes `pictures` that a prepared body has left, on threads of
    their own; those that are elsewhere are fetched before, in place. Their bytes are counted until then.
    `interrupt` and what is raised as in `prepared`, and PromptError.
    """
    size = sum(len(picture.url) for picture in pictures)
    context.body.hold(size)
    try:
        await until_gone(context.http, fetch(context, pictures))
        interrupted = interruptible(work, size, context.service.bodies, PICTURE_WORK)
        return await until_gone(context.http, interrupted)
    finally:
        context.body.release()


def check_media_type(headers: Headers) -> None:
    """Raises ApiError 415 unless the headers are those of JSON in UTF-8, or say nothing."""
    wrong = None
    if (header := headers.get("content-type")) is not None:
        message = Message()
        message["content-type"] = header
        media = message.get_content_type()
        charset = str(message.get_param("charset", "")).lower()
        if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
            wrong = f"content-type must be application/json, not {media}"
        elif charset not in ("", "utf-8", "utf8", "us-ascii"):
            wrong = f"the body must be UTF-8, not {charset}"
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        wrong = wrong or f"content-encoding {encoding} is not supported"
    if wrong:
        raise ApiError(415, wrong, code="unsupported_media_type")


async def received(context: RequestContext) -> bytearray:
    """The whole body. Raises ApiError 413 as soon as it is known to be too long, 429, and ClientLeft."""
    max_bytes = context.service.settings.max_body_mib * 1024**2
    too_large = ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")
    declared = context.http.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async for chunk in context.http.stream():
            if len(body) + len(chunk) > max_bytes:
                raise too_large
            context.body.grow(len(chunk))
            body += chunk
    except ClientDisconnect as error:
        raise ClientLeft from error
    return body


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
