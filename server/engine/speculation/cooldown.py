"""Exponential back-off, counted in steps."""

from __future__ import annotations

GROWTH = 4
"""How many times as long each cooldown is as the last: few retries of what never pays."""

EARLY = 4
"""How many times shorter a cooldown is for a request that begins: what lost for others may pay for it."""


class Cooldown:
    """Steps that are let pass after something lost: more each time, until it does not."""

    __slots__ = ("_early", "_first", "_last", "_next", "_until")

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._next, self._until, self._early = first, 0, 0

    def left(self, now: int) -> int:
        """Steps from step `now` on until it is time for a retry."""
        return max(0, self._until - now)

    @property
    def lost(self) -> bool:
        """Whether it lost, and has not paid since."""
        return self._next > self._first

    def begin(self, now: int, most: float = 1e9, least: int = 0) -> None:
        """It lost in step `now`; `most` steps are enough for it, and it takes `least`."""
        steps = max(least, min(self._next, max(self._first, round(most))))
        self._until, self._early = now + steps, now + max(least, steps // EARLY)
        self._next = min(self._last, GROWTH * self._next)

    def retry_early(self, now: int) -> None:
        """There is a reason to try in step `now`, if a part of the steps is over."""
        if now >= self._early:
            self._until = min(self._until, now)

    def end(self) -> None:
        """It pays: the next one is as short as the first."""
        self._next, self._until = self._first, 0
