"""The token ids of texts that were tokenised lately."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from threading import Lock


class TokenizerCache:
    """Least recently used first out, once there are more than `limit` tokens; safe to use from any thread.

    A token takes 4 bytes, and the text that it stands for about as many.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ids: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = Lock()
        self.tokens = 0
        """How many are remembered."""

    def __len__(self) -> int:
        return len(self._ids)

    def get(self, text: str) -> list[int] | None:
        """The ids of `text`, where they are remembered."""
        with self._lock:
            known = self._ids.get(text)
            if known is not None:
                self._ids.move_to_end(text)
        return None if known is None else known.tolist()

    def put(self, text: str, ids: list[int]) -> None:
        """Remember the ids of `text`, unless they are too many."""
        with self._lock:
            if text not in self._ids and len(ids) <= self._limit:
                self._ids[text] = array("i", ids)
                self.tokens += len(ids)
                while self.tokens > self._limit:
                    _, oldest = self._ids.popitem(last=False)
                    self.tokens -= len(oldest)
