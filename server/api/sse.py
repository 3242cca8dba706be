"""Server-sent events as OpenAI streams them: `data: {json}`, then `data: [DONE]`."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from sse_starlette import EventSourceResponse

from server.api.errors import from_exception

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from starlette.types import Receive, Scope, Send

logger = logging.getLogger(__name__)

ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

LINE_BREAKS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}
"""Legal in JSON, but line ends to clients that split a stream with `str.splitlines`."""


def encode(event: Mapping[str, Any]) -> str:
    """One line of JSON, in UTF-8 rather than escapes."""
    text = ENCODER.encode(event)
    return text if text.isascii() else text.translate(LINE_BREAKS)


class EventStream(EventSourceResponse):
    """Streams `events`; calls `close` when the stream ends, however it ends.

    That includes a client that left before the first event, when the generator's own `finally` never runs.
    """

    def __init__(self, events: AsyncIterator[Mapping[str, Any]], close: Callable[[], None]) -> None:
        super().__init__(_lines(events), sep="\n", headers={"Cache-Control": "no-cache"})
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def _lines(events: AsyncIterator[Mapping[str, Any]]) -> AsyncIterator[bytes]:
    """Whole events, as bytes: what is a string, sse-starlette would take apart and put together again."""
    try:
        async for event in events:
            yield _event(encode(event))
    except Exception as error:
        # the status is sent, so an error event is all that is left; no [DONE], or it would pass for complete
        answer = from_exception(error)
        if answer.status == 500:
            logger.exception("a stream failed")
        yield _event(encode(answer.body()))
        return
    yield _event("[DONE]")


def _event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()
