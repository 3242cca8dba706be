"""Statistics and errors of a drafter. Its exceptions are caught here, so an error costs only its drafts."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ParamSpec, TypeVar

from qwen_serve.server.engine.batch import UNREAD

from .base import Draft, Drafter, DrafterStats, DraftRequest, Guesses
from .cooldown import Cooldown
from .hidden import HiddenDrafter

log = logging.getLogger(__name__)

DISABLED_AFTER, DISABLED_FIRST, DISABLED_LAST = 3, 256, 16_384
"""Consecutive failures that disable a drafter; the steps of the first pause, and of the longest. Each pause
is four times as long as the last."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class DrafterHealth:
    """A drafter, its statistics, and whether it works."""

    drafter: Drafter
    stats: DrafterStats = field(default_factory=DrafterStats)
    disabled: Cooldown = field(default_factory=lambda: Cooldown(DISABLED_FIRST, DISABLED_LAST))
    now: int = 0
    """The current step."""
    failures: int = 0
    """Consecutive failures."""
    fruitless: int = 0
    """Consecutive attempts that found nothing to draft."""

    def call(self, otherwise: T, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the drafter. If it raises, count the failure and return `otherwise`."""
        try:
            return method(*args, **kwargs)
        except Exception as error:  # drafting is optional, so its errors must not fail a request
            self.failed(error)
            return otherwise

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Its drafts; empty ones if it fails."""
        return self._made(self.call(None, self.drafter.propose, requests)) or [Draft() for _ in requests]

    def begin(self, requests: Sequence[DraftRequest]) -> Guesses:
        """Begin its drafts. Those that fail are empty or, after they were begun, UNREAD."""
        if not isinstance(self.drafter, HiddenDrafter):
            return Guesses(lambda: [one.tokens for one in self.propose(requests)])
        if (guesses := self.call(None, self.drafter.begin, requests)) is None:
            return Guesses(lambda: [[] for _ in requests])
        return replace(guesses, read=lambda: self._read(guesses))

    def _read(self, guesses: Guesses) -> list[list[int]]:
        tokens = self._made(self.call(None, guesses.read))
        return tokens if tokens is not None else [[UNREAD] * len(rows) for rows in guesses.rows]

    def _made(self, drafts: T) -> T:
        """Reset the failures of a drafter that made drafts."""
        if drafts is not None:
            self.failures = 0
            self.disabled.end()
        return drafts

    def failed(self, error: Exception) -> None:
        """Count a draft lost to an error; after DISABLED_AFTER in a row, pause the drafter."""
        name, self.failures = self.drafter.name, self.failures + 1
        level = logging.DEBUG if self.stats.failed else logging.WARNING
        log.log(level, "a draft by %s failed, and costs that draft: %s", name, error, exc_info=error)
        self.stats.failed += 1
        if self.failures >= DISABLED_AFTER:
            self.disabled.begin(self.now)

    def begin_anew(self, error: Exception) -> None:
        """Let a drafter that failed drop its states of running sequences, which may be wrong."""
        self.failed(error)
        if isinstance(self.drafter, HiddenDrafter):
            self.call(None, self.drafter.pause)

    @property
    def works(self) -> bool:
        """Whether it has fewer than DISABLED_AFTER failures in a row."""
        return self.failures < DISABLED_AFTER

    @property
    def lost_states(self) -> int:
        """States of sequences lost to errors in copying, saving or freeing them."""
        return self.drafter.lost if isinstance(self.drafter, HiddenDrafter) else 0
