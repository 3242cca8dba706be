"""What drafts may cost that turn out not to pay, counted in plain steps."""

from __future__ import annotations

from math import ceil

FIRST, MOST = 4.0, 16.0
"""Plain steps that drafts may lose at first, and after they have gained many."""

TRIAL = 8.0
"""Plain steps more that they may lose once they have begun: the first ones read the text and build graphs."""

RATE = 0.005
"""Plain steps more that they may lose with each step."""

REST_FIRST, REST_LAST, GROWTH = 64, 1024, 4
"""Steps for which nothing is planned after no plan has paid: first and at most; and growth of each rest."""


class Budget:
    """Drafts spend what they lose and earn what they gain, so that all that is lost stays below a share of
    the time. While nothing is left none are begun. A rest saves the time of planning; each is longer than the
    one before, until drafts have gained."""

    __slots__ = ("_begun", "_left", "_next", "_owed", "_since", "_until")

    def __init__(self) -> None:
        self._left, self._owed, self._since = FIRST, 0.0, 0
        self._until, self._next, self._begun = 0, REST_FIRST, False

    def wait(self, now: int) -> int:
        """Steps from step `now` on until drafts may be made."""
        if (left := self._at(now)) > -TRIAL and self._begun:
            left = 0.0
        self._begun &= left >= 0
        return max(0, self._until - now, ceil(-left / RATE))

    def spend(self, now: int, steps: float) -> None:
        """Take the plain steps that a step with drafts took longer than its tokens alone; negative if it
        gained."""
        self._left, self._since = min(MOST, self._at(now) - steps - self._owed), now
        self._owed, self._begun = 0.0, True
        if self._left >= MOST:
            self._next = REST_FIRST

    def owe(self, steps: float) -> None:
        """Take plain steps that preparing the next draft took, when it is made."""
        self._owed = max(0.0, self._owed + steps)

    def rest(self, now: int) -> None:
        """Begin a rest in step `now`."""
        self._begun = False
        self._until, self._next = now + self._next, min(REST_LAST, GROWTH * self._next)

    def wake(self, now: int) -> None:
        """End a rest, because there is a new request."""
        self._until = min(self._until, now)

    def __str__(self) -> str:
        return f"{self._left:.1f}"

    def _at(self, now: int) -> float:
        return min(MOST, self._left + RATE * (now - self._since))
