"""Questions for drafts that are not asked, because the last answers were no."""

from __future__ import annotations


class Rest:
    """Counts them: `first` after the first no, then `growth` times as many each time, up to `last`."""

    __slots__ = ("_first", "_growth", "_last", "_next", "left")

    def __init__(self, first: int, last: int, growth: int = 2) -> None:
        self._first, self._last, self._growth = first, last, growth
        self._next, self.left = first, 0
        """What comes after the next no, and how many are left of this one."""

    def over(self) -> bool:
        """Whether it is time to ask. To be called once a step."""
        if self.left:
            self.left -= 1
            return False
        return True

    def begin(self) -> None:
        """The answer was no."""
        self.left, self._next = self._next, min(self._last, self._growth * self._next)

    @property
    def begun(self) -> bool:
        """Whether there has been a no since the last yes that counts."""
        return self._next > self._first

    def end(self) -> None:
        """The answer was yes, and held good."""
        self._next, self.left = self._first, 0
