"""Server-sent events: `data: {json}`, and what ends them; several choices as one stream.

Chat and text completions end with `data: [DONE]`. Protocols whose objects have a `type` name the event after
it, and end with an object that says so.
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
"""Legal in JSON, but line ends to clients that split a stream with `str.splitlines`."""


NEVER_S = 10**9


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


class EventWriter:
    """A format's way to write one response as events; OpenAI's is what is the same in most."""

    media_type = "text/event-stream"
    pings = True
    """Whether there is anything that keeps an idle connection open and says nothing."""

    def begin(self) -> bytes:
        """What comes before the first part; may be nothing."""
        return b""

    async def write(self, index: int, part: Any) -> bytes:
        """A part of the answer `index`, None once it is complete; may be nothing."""
        raise NotImplementedError

    async def end(self) -> bytes:
        """What comes once all answers are complete. Raises ApiError where the server cut them short."""
        raise NotImplementedError

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""
        return event(error.body())

    def ping(self) -> ServerSentEvent:
        """What keeps an idle connection open."""
        return ServerSentEvent(comment="ping", sep="\n")


class EventStream(EventSourceResponse):
    """Streams answers as `writer` has them; calls `close`, with what went wrong, however the stream ends.

    That includes a client that left before the first event, when a generator's own `finally` never runs."""

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
            # the status is sent: an event is all that is left; no [DONE], or it would pass for complete
            self._error = answer = from_exception(error)
            if answer.status == 500:
                logger.exception("a stream failed")
            yield writer.failure(answer)


async def merge(streams: Sequence[AsyncIterator[Item]]) -> AsyncGenerator[tuple[int, Item | None], None]:
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
