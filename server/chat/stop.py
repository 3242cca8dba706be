"""Finding any of many stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopStrings:
    """Aho-Corasick automaton over the stop strings: one step a character, however many strings there are.

    After each character, `held` is the length of the longest end of the text that could still grow into a
    stop string. The stop that is *completed first* wins, and of those that are completed by the same
    character the longest, so the result does not depend on how the text was cut into pieces. Raises
    ValueError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[str | None] = [None]
        self._fallback = [0]
        for stop in stops:
            self._insert(stop)
        self._link()
        self._node = 0

    @property
    def held(self) -> int:
        return self._depth[self._node]

    def step(self, character: str) -> str | None:
        """Read one character; return the stop string that it completes, if any."""
        node = self._node
        while node and character not in self._next[node]:
            node = self._fallback[node]
        self._node = self._next[node].get(character, 0)
        return self._match[self._node]

    def _insert(self, stop: str) -> None:
        if not stop:
            raise ValueError("a stop string must not be empty")
        node = 0
        for character in stop:
            if character not in self._next[node]:
                self._next[node][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._match.append(None)
                self._fallback.append(0)
            node = self._next[node][character]
        self._match[node] = stop

    def _link(self) -> None:
        """Breadth first: a node falls back to the longest proper end of its text that is a node too."""
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            self._match[node] = self._match[node] or self._match[self._fallback[node]]
            for character, child in self._next[node].items():
                back = self._fallback[node]
                while back and character not in self._next[back]:
                    back = self._fallback[back]
                self._fallback[child] = self._next[back].get(character, 0)
                queue.append(child)
