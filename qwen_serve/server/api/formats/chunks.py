"""Streams of chunks, for chat and text completions."""

from typing import Any

from qwen_serve.server.api.serving import ServedRequest, progress_of
from qwen_serve.server.api.sse import EventWriter, ending, event


class ChunkWriter(EventWriter):
    """Each chunk is an event. The end of the last choice, usage on request, and `[DONE]` are sent
    together."""

    def __init__(self, served: ServedRequest, kind: str) -> None:
        self._served, self._kind = served, kind
        self._left = len(served.generations)
        self._last: dict[str, Any] = {}
        self._unread = set(range(self._left)) if served.request.reports_progress else set()
        """Choices that report their prompt's progress until they have a token."""

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._served.envelope(self._kind, [choice]), **self._served.of_chunk()}

    def _progress(self, index: int, choice: dict[str, Any], *, read: bool) -> bytes:
        """The prompt's progress. `read` means that the first token has arrived, after which there is no
        progress."""
        if read:
            self._unread.discard(index)
        progress = progress_of(self._served.generations[index], read=read)
        return event({**self._chunk(choice), "prompt_progress": progress})

    def _finished(self, choice: dict[str, Any]) -> bytes:
        """The end of a choice, unless it is the last."""
        self._left -= 1
        self._last = self._chunk(choice)
        return event(self._last) if self._left else b""

    async def end(self) -> bytes:
        served = self._served
        last = {**self._last, **served.extras()}
        usage = [{**served.envelope(self._kind, []), "usage": served.usage()}] if served.include_usage else []
        return ending(last, *usage)
