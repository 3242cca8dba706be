"""Steps in which nobody is asked for drafts, because the last answers were no."""

from __future__ import annotations


class Rest:
    """Counts questions that are not asked: `first` after the first no, then twice as many, up to `last`."""

    __slots__ = ("_first", "_last", "_left", "_next")

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._next, self._left = first, 0

    def over(self) -> bool:
        """Whether it is time to ask. To be called once a step."""
        if self._left:
            self._left -= 1
            return False
        return True

    def begin(self) -> None:
        """The answer was no."""
        self._left, self._next = self._next, min(self._last, 2 * self._next)

    @property
    def begun(self) -> bool:
        """Whether there has been a no since the last yes that counts."""
        return self._next > self._first

    def end(self) -> None:
        """The answer was yes, and held good."""
        self._next, self._left = self._first, 0
