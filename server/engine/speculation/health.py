"""What became of a drafter's drafts, and whether it works: its errors end here, and cost its drafts alone."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from .base import DrafterStats
from .cooldown import Cooldown
from .hidden import HiddenDrafter

if TYPE_CHECKING:
    from collections.abc import Callable

    from .base import Drafter

log = logging.getLogger(__name__)

DISABLED_AFTER, DISABLED_FIRST, DISABLED_LAST = 3, 256, 16_384
"""Failures in a row after which a drafter is not asked for so many steps, four times as many each time."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class DrafterHealth:
    """A drafter, what became of its drafts, and whether it works."""

    drafter: Drafter
    stats: DrafterStats = field(default_factory=DrafterStats)
    disabled: Cooldown = field(default_factory=lambda: Cooldown(DISABLED_FIRST, DISABLED_LAST))
    now: int = 0
    """The step that is being made."""
    failures: int = 0
    """In a row."""
    fruitless: int = 0
    """Looks in a row that found nothing to draft."""

    def call(self, otherwise: T, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a method of the drafter returns; `otherwise` where it raises, which is counted."""
        try:
            return method(*args, **kwargs)
        except Exception as error:  # whatever it is, it is not worth a request
            self.failed(error)
            return otherwise

    def succeeded(self) -> None:
        """It has drafted."""
        self.failures = 0
        self.disabled.end()

    def failed(self, error: Exception) -> None:
        """A draft was lost to an error."""
        name, self.failures = self.drafter.name, self.failures + 1
        level = logging.DEBUG if self.stats.failed else logging.WARNING
        log.log(level, "a draft by %s failed, and costs that draft: %s", name, error, exc_info=error)
        self.stats.failed += 1
        if self.failures >= DISABLED_AFTER:
            self.disabled.begin(self.now)

    def begin_anew(self, error: Exception) -> None:
        """It failed, and what it has of running sequences may be wrong: it drops that, if it has any."""
        self.failed(error)
        if isinstance(self.drafter, HiddenDrafter):
            self.call(None, self.drafter.pause)

    @property
    def works(self) -> bool:
        """Whether it has not failed too often in a row."""
        return self.failures < DISABLED_AFTER

    @property
    def lost_states(self) -> int:
        """States of sequences that it lost to errors while they were copied, saved or freed."""
        return self.drafter.lost if isinstance(self.drafter, HiddenDrafter) else 0
