"""Exponential back-off, counted in steps."""

GROWTH = 4
"""Each cooldown is this many times as long as the last, so that drafts that never pay are seldom retried."""

EARLY = 4
"""For a new request a cooldown is this many times shorter, since drafts that lost for others may pay for
it."""


class Cooldown:
    """Steps to skip after a loss: more after each loss, until drafts pay again."""

    __slots__ = ("_early", "_first", "_last", "_next", "_until")

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._next, self._until, self._early = first, 0, 0

    def left(self, now: int) -> int:
        """Steps from step `now` on until the retry."""
        return max(0, self._until - now)

    @property
    def lost(self) -> bool:
        """Whether drafts lost and have not paid since."""
        return self._next > self._first

    def begin(self, now: int, most: float = 1e9, least: int = 0) -> None:
        """Start a cooldown of `least` to about `most` steps after a loss in step `now`."""
        steps = max(least, min(self._next, max(self._first, round(most))))
        self._until, self._early = now + steps, now + max(least, steps // EARLY)
        self._next = min(self._last, GROWTH * self._next)

    def retry_early(self, now: int) -> None:
        """End the cooldown in step `now`, if enough of its steps are over."""
        if now >= self._early:
            self._until = min(self._until, now)

    def end(self) -> None:
        """End the cooldown because drafts pay. The next one is as short as the first."""
        self._next, self._until = self._first, 0
