"""How many tokens a text may still have, while it is tokenized."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import PromptTooLong

if TYPE_CHECKING:
    from collections.abc import Callable


class TokenBudget:
    """Told of a prompt's ids as they come; the `check` that `Vocab.tokenize` takes.

    Raises PromptTooLong, or what `error` makes, once there are `limit` of them, so that no work is done for
    the rest, and whatever `interrupt`, called each time, raises.
    """

    def __init__(
        self,
        limit: int,
        interrupt: Callable[[], None],
        error: Callable[[int, int], Exception] = PromptTooLong,
    ) -> None:
        """`error` is told how many there are, and the limit."""
        self._limit, self._interrupt, self._error = limit, interrupt, error
        self.used = 0

    def __call__(self, count: int) -> None:
        self._interrupt()
        self.used += count
        if self.used >= self._limit:
            raise self._error(self.used, self._limit)
