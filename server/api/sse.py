"""Server-sent events: `data: {json}` and the end of a stream; several choices as one stream.

Chat and text completions end with `data: [DONE]`. Protocols whose objects have a `type` name each event after
it, and end with an object of their own.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic_core import to_json
from sse_starlette import EventSourceResponse, ServerSentEvent

from qwen_serve.server.api.errors import from_exception

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence

    from starlette.types import Receive, Scope, Send

    from qwen_serve.server.api.errors import ApiError

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

LINE_BREAKS = {char.encode(): f"\\u{ord(char):04x}".encode() for char in "\x85\u2028\u2029"}
"""Legal in JSON, but line breaks to clients that split a stream with `str.splitlines`."""


NEVER_S = 10**9


class Lazily(Generic[Item]):
    """A long JSON list whose values are created as they are written. Together they would take much memory,
    and encoding them at once would block all other threads."""

    def __init__(self, write: Callable[[Item], Any], items: list[Item]) -> None:
        self._write, self.items = write, items

    def __iter__(self) -> Iterator[Any]:
        return (self._write(item) for item in self.items)


def encode(value: Any) -> bytes:
    """One line of JSON, in UTF-8 without escapes."""
    written = to_json(value, fallback=iter)
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
    """Writes one response as events; the base class does what most formats share, in OpenAI's way."""

    media_type = "text/event-stream"
    pings = True
    """Whether the format has an event that only keeps an idle connection open."""

    def begin(self) -> bytes:
        """Bytes before the first part; may be empty."""
        return b""

    async def write(self, index: int, part: Any) -> bytes:
        """The bytes of a part of answer `index`, or of its end for None; may be empty."""
        raise NotImplementedError

    async def end(self) -> bytes:
        """Bytes after all answers. Raises ApiError if the server cut them short."""
        raise NotImplementedError

    def failure(self, error: ApiError) -> bytes:
        """The last event of a failed stream."""
        return event(error.body())

    def ping(self) -> ServerSentEvent:
        """The event that keeps an idle connection open."""
        return ServerSentEvent(comment="ping", sep="\n")


class EventStream(EventSourceResponse):
    """Streams answers through `writer`. Calls `close` however the stream ends, with the error if there is
    one.

    That includes a client that left before the first event, when a generator's own `finally` never runs.
    """

    def __init__(
        self,
        answers: Sequence[AsyncIterator[Any]],
        writer: EventWriter,
        close: Callable[[ApiError | None], None],
    ) -> None:
        super().__init__(
            self._events(answers, writer),
            media_type=writer.media_type,
            ping=None if writer.pings else NEVER_S,
            sep="\n",
            headers={"Cache-Control": "no-cache"},
            ping_message_factory=writer.ping,
        )
        self._close = close
        self._error: ApiError | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close(self._error)

    async def _events(
        self, answers: Sequence[AsyncIterator[Any]], writer: EventWriter
    ) -> AsyncGenerator[bytes, None]:
        try:
            if begun := writer.begin():
                yield begun
            async with aclosing(merge(answers)) as parts:
                async for index, part in parts:
                    if written := await writer.write(index, part):
                        yield written
            yield await writer.end()
        except Exception as error:
            # the status is sent already, so only an event can report it; without [DONE] the stream does not
            # pass for complete
            self._error = answer = from_exception(error)
            if answer.status == 500:
                logger.exception("a stream failed")
            yield writer.failure(answer)


async def merge(streams: Sequence[AsyncIterator[Item]]) -> AsyncGenerator[tuple[int, Item | None], None]:
    """Items of all streams as they arrive, each with its stream's index; None when a stream ends.

    An exception in any stream ends them all.
    """
    if len(streams) == 1:  # nothing to merge, so no tasks
        async for item in streams[0]:
            yield 0, item
        yield 0, None
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
