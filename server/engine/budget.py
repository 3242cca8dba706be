"""How many tokens a prompt may still have, while it is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import PromptTooLong

if TYPE_CHECKING:
    from collections.abc import Callable


class TokenBudget:
    """Told of a prompt's ids as they come; the `check` that `Vocab.tokenize` takes.

    Raises PromptTooLong once there are `limit` of them, so that no work is done for the rest, and whatever
    `interrupt`, called each time, raises.
    """

    def __init__(self, limit: int, interrupt: Callable[[], None]) -> None:
        self._limit = limit
        self._interrupt = interrupt
        self.used = 0

    def __call__(self, count: int) -> None:
        """So many more."""
        self._interrupt()
        self.used += count
        if self.used >= self._limit:
            raise PromptTooLong(self.used, self._limit, at_least=True)
