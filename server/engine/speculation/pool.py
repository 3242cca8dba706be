"""Texts of finished requests, kept so that later ones may draft from them. Off unless asked for.

What it means to turn it on: a draft may then hold tokens of somebody else's request. They are only ever
guesses that the model has to confirm, so no answer changes; but how fast an answer comes can tell a patient
client that someone had a similar one, as any cache shared between users does. And a benchmark that sends the
same prompt again is then drafted from its own earlier answers: say so beside such a figure.
"""

from __future__ import annotations

from dataclasses import dataclass

from .suffixes import LONGEST_COMPARED, SuffixIndex

BETWEEN = (1 << 31) - 1
"""Stands between two texts: no token of any vocabulary."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A place in the pool: as long as `match` agrees with the text that was looked up."""

    text: list[int]
    source: int
    match: int

    def continuation(self, n: int) -> list[int]:
        """At most `n` tokens that followed, up to the end of the text that they are from."""
        follows = self.text[self.source : self.source + n]
        return follows[: follows.index(BETWEEN)] if BETWEEN in follows else follows


class Pool:
    """At most `capacity` tokens of texts, the oldest of which make room in one piece with others."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._index = SuffixIndex([])

    @property
    def size(self) -> int:
        """Tokens held, separators included."""
        return len(self._index.tokens)

    def add(self, text: list[int]) -> None:
        """Keep the end of a text, as much as the pool may hold."""
        added = [*text[-(self._capacity - 1) :], BETWEEN] if self._capacity > 1 else []
        held = self._index.tokens
        if len(held) + len(added) > self._capacity:
            # rebuilding costs the same however little is dropped, so half of the pool goes at once
            kept = min(self._capacity // 2, self._capacity - len(added), len(held))
            self._index = SuffixIndex(held[len(held) - kept :] + added)
        else:
            held += added
            self._index.update()

    def find(self, text: list[int]) -> Passage:
        """The passage that agrees longest with the end of `text`."""
        source, match = self._index.find(text[-LONGEST_COMPARED:])
        return Passage(self._index.tokens, source, match)
