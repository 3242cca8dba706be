"""Server-sent events: `data: {json}`, and what ends them; several choices as one stream.

Chat and text completions end with `data: [DONE]`. Protocols whose objects have a `type` name the event after
it, and end with an object that says so.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic_core import to_json
from sse_starlette import EventSourceResponse, ServerSentEvent

from qwen_serve.server.api.errors import ApiError, from_exception
from qwen_serve.server.api.observe.record import record_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence

    from starlette.types import Receive, Scope, Send

    from qwen_serve.server.api.errors import ApiError

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

LINE_BREAKS = {char.encode(): f"\\u{ord(char):04x}".encode() for char in "\x85\u2028\u2029"}
"""Legal in JSON, but line ends to clients that split a stream with `str.splitlines`."""


class Lazily(Generic[Item]):
    """A long list in JSON, each value of which is made as it is written: all of them together would take much
    memory, and their encoding in one piece would let no other thread run."""

    def __init__(self, write: Callable[[Item], Any], items: list[Item]) -> None:
        self._write, self.items = write, items

    def __iter__(self) -> Iterator[Any]:
        return (self._write(item) for item in self.items)


def encode(value: Any) -> bytes:
    """One line of JSON, in UTF-8 rather than escapes."""
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
    """The last events and the mark of a complete stream, in one piece: a client wakes up once for them."""
    return b"".join(map(event, events)) + b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Dialect:
    """What protocols differ in beside their events."""

    failure: Callable[[ApiError], bytes] = lambda error: event(error.body())
    """The last event of a stream that fails."""
    ping: Callable[[], ServerSentEvent] | None = None
    """What keeps an idle connection open; None is an SSE comment."""


OPENAI = Dialect()


class EventStream(EventSourceResponse):
    """Streams whole `events`; calls `close` when the stream ends, however it ends.

    That includes a client that left before the first event, when the generator's own `finally` never runs."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], None],
        dialect: Dialect = OPENAI,
    ) -> None:
        self._error: ApiError | None = None
        super().__init__(
            self._to_the_end(events, dialect.failure),
            sep="\n",
            headers={"Cache-Control": "no-cache"},
            ping_message_factory=dialect.ping,
        )
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()
            if self._error is not None and (record := record_of(scope)) is not None:
                record.error = self._error

    async def _to_the_end(
        self, events: AsyncGenerator[bytes, None], failure: Callable[[ApiError], bytes]
    ) -> AsyncGenerator[bytes, None]:
        """The events as they are; a failure becomes the last of them."""
        async with aclosing(events):
            try:
                async for data in events:
                    yield data
            except Exception as error:
                # the status is sent: an event is all that is left; no [DONE], or it would pass for complete
                self._error = answer = from_exception(error)
                if answer.status == 500:
                    logger.exception("a stream failed")
                yield failure(answer)


async def merge(streams: Sequence[AsyncIterator[Item]]) -> AsyncIterator[tuple[int, Item | None]]:
    """Items of all streams as they come, each with its stream's index; None once a stream is exhausted.

    An exception in any stream ends them all.
    """
    if len(streams) == 1:  # nothing to merge, no tasks to pay for
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
