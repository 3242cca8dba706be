"""A client's request: its body, a JSON object of bounded size, and whether the client still waits."""

import asyncio
import math
import re
from collections.abc import Awaitable, Callable
from email.message import Message
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from qwen_serve.server.api.context import RequestContext
from qwen_serve.server.api.errors import ApiError, ClientLeft, bad_request, from_validation
from qwen_serve.server.api.limits import PICTURE_WORK, in_thread, interruptible
from qwen_serve.server.api.picture_urls import fetch
from qwen_serve.server.api.service import Backend, unavailable
from qwen_serve.server.chat.pictures import GivenPicture

Schema = TypeVar("Schema", bound=BaseModel)
Result = TypeVar("Result")

LARGE_JSON = 128 * 1024
"""A body of this many bytes is decoded on a thread. For a smaller one, passing it to a thread costs as much
as the work."""

MAX_VALUES = 2**19
"""Most JSON values of a body, counted by brackets and commas. All of them are created with the GIL held."""

MAX_KEYS = 2**17
"""Most keys of a body's objects. Creating and hashing a key takes five times as long as creating a value."""

KEY = re.compile(rb"(?<!\\)(?:\\\\)*\"[ \t\r\n]*:")
"""The end of a key. A quote inside a string has an odd number of backslashes before it."""

MAX_DIGITS = 2**20
"""Most digits in all of a body's numbers of 19 or more digits, those in strings included. Numbers of more
than 64 bits are slow to parse."""

LONG_NUMBER = re.compile(rb"[0-9]{19,}")

SLICE = 2**17
"""Bytes searched for keys or numbers at a time, with the GIL held."""


async def read_request(context: RequestContext, choose: Callable[[dict[str, Any]], type[Schema]]) -> Schema:
    """Reads the body into the schema that `choose` names for it.

    While the service has no model, the request is refused before it is read; a sleeping model is loaded later
    (`ensure_loaded`). A large body waits here until earlier ones have become prompts (`prepared`). Raises
    ApiError 400, 413, 415, 429 and 503.
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

    return await on_thread(work, context.body.size)


async def ensure_loaded(context: RequestContext, check: Callable[[], object] = lambda: None) -> Backend:
    """Waits until the model that this request needs is loaded, and returns it.

    If the model sleeps, `check` runs first, on a thread. If it raises, the model is not loaded. Raises
    ApiError 503, ClientLeft, and what `check` raises.
    """
    if sleeping := context.service.status == "sleeping":
        await until_gone(context.http, in_thread(check, context.body.size))
    context.needs_model = True
    if sleeping:
        await until_gone(context.http, context.service.wake())
    return context.service.backend


def decode(body: bytes | bytearray) -> dict[str, Any]:
    """The JSON object in `body`; an empty one for no body. Raises ApiError 400."""
    marks = count_marks(body) if len(body) > MAX_VALUES else 0  # so many keys are longer, too
    if marks > MAX_VALUES and sum(map(body.count, b"[{,")) > MAX_VALUES:
        raise ApiError(400, f"the body has more than {MAX_VALUES:,} JSON values", code="invalid_json")
    if marks > MAX_KEYS and body.count(b":") > MAX_KEYS and count_keys(body) > MAX_KEYS:
        raise ApiError(400, f"the body's objects have more than {MAX_KEYS:,} keys", code="invalid_json")
    if len(body) > MAX_DIGITS and count_digits(body) > MAX_DIGITS:
        message = f"the body's numbers of 19 digits or more have more than {MAX_DIGITS:,} digits together"
        raise ApiError(400, message, code="invalid_json")
    try:
        decoded = from_json(body or b"{}", allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(decoded, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    for field, value in decoded.items():
        if not all_finite(value):
            raise bad_request(field, "a number is too large, as 1e400 would be")
    return decoded


def count_marks(body: bytes | bytearray) -> int:
    """Counts a JSON text's opening brackets, commas and colons, those in strings included: an upper bound for
    its values and keys.

    A picture's base64 has none of them. This is faster than counting each of the four characters.
    """
    parts = (body[at : at + SLICE] for at in range(0, len(body), SLICE))
    return sum(len(part) - len(part.translate(None, b"[{,:")) for part in parts)


def count_keys(body: bytes | bytearray) -> int:
    """Counts the keys in a JSON text, except those that span two slices.

    A string that begins with a colon counts as a key.
    """
    return sum(len(KEY.findall(body, at, at + SLICE)) for at in range(0, len(body), SLICE))


def count_digits(body: bytes | bytearray) -> int:
    """Counts the digits of a JSON text's long numbers, except some that span two slices."""
    return sum(
        len(number)
        for at in range(0, len(body), SLICE)
        for number in LONG_NUMBER.findall(body, at, at + SLICE)
    )


def all_finite(value: Any) -> bool:
    """Whether all numbers in a JSON value are finite, since infinity cannot be written as JSON.

    The decoder reads 1e400 as infinity, whatever `allow_inf_nan` is.
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
    """Runs `work()`, which creates objects from a body of `size` bytes; on a thread for a large body."""
    return await in_thread(work, size) if size >= LARGE_JSON else work()


async def prepared(context: RequestContext, work: Callable[[Callable[[], None]], Result]) -> Result:
    """Runs `work(interrupt)`, which turns the request's body into a prompt, on a thread.

    The tokenizer works without Python's lock, so the event loop and other prompts go on.

    `interrupt` raises once the client has left, and then this raises ClientLeft. Afterwards the body is no
    longer counted.
    """
    try:
        interrupted = interruptible(work, context.body.size, context.service.bodies)
        return await until_gone(context.http, interrupted)
    finally:
        context.body.release()


async def encode_images(
    context: RequestContext, work: Callable[[Callable[[], None]], Result], pictures: list[GivenPicture]
) -> Result:
    """Runs `work(interrupt)`, which decodes and encodes the `pictures` of a prepared body, on the threads for
    pictures. Pictures given by URL are fetched first, in place. The pictures' bytes are counted until the
    work is done. `interrupt` and exceptions are those of `prepared`, and PromptError."""
    size = sum(len(picture.url) for picture in pictures)
    context.body.hold(size)
    try:
        await until_gone(context.http, fetch(context, pictures))
        interrupted = interruptible(work, size, context.service.bodies, PICTURE_WORK)
        return await until_gone(context.http, interrupted)
    finally:
        context.body.release()


def check_media_type(headers: Headers) -> None:
    """Raises ApiError 415 unless the headers declare JSON in UTF-8, or nothing."""
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
    """Receives the whole body. Raises ApiError 413 as soon as it is known to be too long, 429, and
    ClientLeft."""
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
    """The result of `work`, which is cancelled if the client disconnects. Raises ClientLeft then.

    The request's body must have been read.
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
