"""A drafter under watch: what became of its drafts, and whether it works."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .base import DrafterStats
from .controller import Backoff

if TYPE_CHECKING:
    from .base import Drafter

log = logging.getLogger(__name__)

DISABLED_AFTER, DISABLED_FIRST, DISABLED_LAST = 3, 256, 16_384
"""Failures in a row after which a drafter is not asked for so many steps, four times as many each time."""


@dataclass(slots=True)
class Watched:
    """A drafter, what became of its drafts, and whether it works."""

    drafter: Drafter
    stats: DrafterStats = field(default_factory=DrafterStats)
    disabled: Backoff = field(default_factory=lambda: Backoff(DISABLED_FIRST, DISABLED_LAST))
    failures: int = 0
    """In a row."""
    fruitless: int = 0
    """Looks in a row that found nothing to draft."""

    def succeeded(self) -> None:
        """It has drafted."""
        self.failures = 0
        self.disabled.end()

    def failed(self, error: Exception, now: int) -> None:
        """A draft was lost to an error, in step `now`."""
        name, self.failures = self.drafter.name, self.failures + 1
        level = logging.DEBUG if self.stats.failed else logging.WARNING
        log.log(level, "a draft by %s failed, and costs that draft: %s", name, error, exc_info=error)
        self.stats.failed += 1
        if self.failures >= DISABLED_AFTER:
            self.disabled.begin(now)

    @property
    def works(self) -> bool:
        """Whether it has not failed too often in a row."""
        return self.failures < DISABLED_AFTER
