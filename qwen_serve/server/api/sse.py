"""Server-sent events: `data: {json}`, the end of a stream, and several choices as one stream.

Chat and text completions end with `data: [DONE]`. In protocols whose objects have a `type`, that is the name
of each event, and an object of their own ends the stream.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from pydantic_core import to_json
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from qwen_serve.server.api.errors import ApiError, from_exception

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

LINE_BREAKS = {char.encode(): f"\\u{ord(char):04x}".encode() for char in "\x85\u2028\u2029"}
"""Characters that are legal in JSON, but line breaks for clients that use `str.splitlines`."""


class Lazily(Generic[Item]):
    """A long JSON list whose values are created while it is written. All values at once would take much
    memory, and encoding them would block all other threads."""

    def __init__(self, write: Callable[[Item], Any], items: list[Item]) -> None:
        self._write, self.items = write, items

    def __iter__(self) -> Iterator[Any]:
        return (self._write(item) for item in self.items)


class Written(Generic[Item]):
    """A JSON list that `write` makes of its items, as bytes, when the value around it is encoded."""

    def __init__(self, write: Callable[[list[Item]], bytes], items: list[Item]) -> None:
        self.write, self.items = write, items


PLACE = secrets.token_hex(16)
"""Stands for a `Written` part while the rest is encoded. No client can know it."""


def encode(value: Any) -> bytes:
    """One line of JSON, in UTF-8 without escapes."""
    parts: list[bytes] = []

    def fallback(found: Any) -> Any:
        if not isinstance(found, Written):
            return iter(found)
        parts.append(found.write(found.items))
        return PLACE

    written = to_json(value, fallback=fallback)
    if parts:
        around = written.split(f'"{PLACE}"'.encode())
        written = b"".join([piece for pair in zip(around, [*parts, b""], strict=True) for piece in pair])
    if not written.isascii():
        for char, escaped in LINE_BREAKS.items():
            written = written.replace(char, escaped)
    return written


def event(data: Mapping[str, Any]) -> bytes:
    return b"".join((b"data: ", encode(data), b"\n\n"))


def typed_event(data: Mapping[str, Any]) -> bytes:
    """One event, named after its object's type."""
    return f"event: {data['type']}\n".encode() + event(data)


def ending(*events: Mapping[str, Any]) -> bytes:
    """The last events and the end mark of a stream, in one piece, so that a client wakes up once."""
    return b"".join(map(event, events)) + b"data: [DONE]\n\n"


class EventWriter:
    """Writes one response as events. The base class has what most formats share, in OpenAI's format."""

    media_type = "text/event-stream"
    pings = True
    """Whether the format has an event that only keeps an idle connection open."""

    def begin(self) -> bytes:
        """Bytes before the first part; may be empty."""
        return b""

    async def write(self, index: int, part: Any) -> bytes:
        """The bytes of a part of answer `index`, or of the answer's end if `part` is None; may be empty."""
        raise NotImplementedError

    async def end(self) -> bytes:
        """Bytes after all answers. Raises ApiError if the server ended them early."""
        raise NotImplementedError

    def failure(self, error: ApiError) -> bytes:
        """The last event of a failed stream."""
        return event(error.body())

    def ping(self) -> ServerSentEvent:
        """The event that keeps an idle connection open."""
        return ServerSentEvent(comment="ping", sep="\n")


class EventStream(EventSourceResponse):
    """Streams answers through `writer`. However the stream ends, it calls `close`, with the error if there is
    one.

    It does so even if the client left before the first event, in which case a generator's `finally` never
    runs.
    """

    def __init__(
        self,
        answers: Sequence[AsyncIterator[Any]],
        writer: EventWriter,
        close: Callable[[ApiError | None], None],
    ) -> None:
        self._parts, self._writer, self._close = merge(answers), writer, close
        self._error: ApiError | None = None
        super().__init__(
            self._parts,
            # a cache must ask before it repeats an answer
            headers={"Cache-Control": "no-cache"},
            media_type=writer.media_type,
            ping=None if writer.pings else 0,
            ping_message_factory=writer.ping,
        )
        del self.headers["connection"]  # the HTTP server knows whether it stays open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close(self._error)

    async def _stream_response(self, send: Send) -> None:
        """Writes each event once, and the last one together with the body's end.

        The library's own sets a time limit for each write, which costs 10 us a token.
        """
        headers = self.raw_headers
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        writer = self._writer
        try:
            if written := writer.begin():
                await send({"type": "http.response.body", "body": written, "more_body": True})
            async with aclosing(self._parts) as parts:
                async for index, part in parts:
                    if written := await writer.write(index, part):
                        await send({"type": "http.response.body", "body": written, "more_body": True})
            last = await writer.end()
        except Exception as error:
            # the status is sent already, so only an event can report the error; without [DONE] clients see
            # that the stream is incomplete
            self._error = answer = from_exception(error)
            if answer.status == 500:
                logger.exception("a stream failed")
            last = writer.failure(answer)
        self.active = False  # ends the pings
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def merge(streams: Sequence[AsyncIterator[Item]]) -> AsyncGenerator[tuple[int, Item | None], None]:
    """Items of all streams as they arrive, each with its stream's index; None when a stream ends.

    An exception in any stream ends them all.
    """
    if len(streams) == 1:  # nothing to merge, so no tasks
        try:
            async for item in streams[0]:
                yield 0, item
            yield 0, None
        finally:
            if isinstance(streams[0], AsyncGenerator):
                await streams[0].aclose()
        return
    queue: asyncio.Queue[tuple[int, Item | None] | Exception] = asyncio.Queue(len(streams))

    async def pump(index: int, stream: AsyncIterator[Item]) -> None:
        try:
            async for item in stream:
                await queue.put((index, item))
            await queue.put((index, None))
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            got = await queue.get()
            if isinstance(got, Exception):
                raise got
            running -= got[1] is None
            yield got
    finally:
        for task in tasks:
            task.cancel()
