"""Acceptance of a request's drafted tokens, by depth."""

from __future__ import annotations

from itertools import accumulate
from typing import Self

DEPTHS, MEMORY = 16, 24
"""Number of depths that are counted separately, since the first tokens are right more often. Number of tries
that are remembered for each depth, so that acceptance follows a text that changes."""

UNREACHED, IDLE = 0.03, 0.01
"""Share of a depth's counts that is forgotten when a draft did not reach it, and in a step without a draft,
so that it is tried again."""

ASSUMED = 2
"""An assumption counts as this many tries."""


class Acceptance:
    """How often drafted tokens of one kind were right, by depth, if all tokens before them were right."""

    __slots__ = ("_assumed", "_hits", "_now", "_right", "_tries", "tried")

    def __init__(self, assumed: float) -> None:
        self._assumed, self.tried, self._now = assumed, False, 0
        self._hits, self._tries = [0.0] * DEPTHS, [0.0] * DEPTHS
        self._right: list[float] = []

    def add(self, drafted: int, accepted: int, now: int = 0) -> None:
        """Record a draft of `drafted` tokens, of which the first `accepted` were right, in step `now`."""
        self.at(now)
        self.tried, self._now = True, now
        tested = min(accepted + 1, drafted, DEPTHS)
        self._forget(UNREACHED, tested)
        for depth in range(tested):
            self._hits[depth] += (depth < accepted) - self._hits[depth] / MEMORY
            self._tries[depth] += 1 - self._tries[depth] / MEMORY

    def at(self, now: int) -> Self:
        """Itself, after some of it was forgotten for the steps before step `now` in which nothing was
        drafted."""
        if (idle := now - self._now - 1) > 0:
            self._forget(1 - (1 - IDLE) ** idle, 0)
            self._now = now - 1
        return self

    def _forget(self, share: float, start: int) -> None:
        for counts in (self._hits, self._tries):
            counts[start:] = [(1 - share) * count for count in counts[start:]]
        self._right.clear()

    def right(self, n: int) -> list[float]:
        """The probabilities that all tokens up to each of `n` depths are right."""
        if not self._right:
            chance, right = self._assumed, 1.0
            for hits, tries in zip(self._hits, self._tries, strict=True):
                chance = (hits + ASSUMED * chance) / (tries + ASSUMED)  # the depth before is the prior
                right *= chance
                self._right.append(right)
        if n <= DEPTHS:
            return self._right[:n]
        last = min(0.9999, self._right[-1] / self._right[-2])
        beyond = accumulate(range(n - DEPTHS), lambda right, _: right * last, initial=self._right[-1])
        return [*self._right, *list(beyond)[1:]]

    def expected(self, n: int) -> float:
        """Expected right tokens of a draft of `n`."""
        return sum(self.right(n))
