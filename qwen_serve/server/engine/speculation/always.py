"""A policy that always drafts, for tests that need many drafts of any quality."""

from collections.abc import Sequence

from .base import Drafter
from .policy import Option, Plan, Policy, Step


class Always(Policy):
    """Chooses the longest drafts at any cost, instant drafters first."""

    def cooldown(self, drafter: Drafter, n: int) -> int:
        """No cooldown."""
        return 0

    def allowed(self, drafter: Drafter, n: int) -> set[str]:
        """All kinds."""
        return set(drafter.kinds)

    def choose(self, options: Sequence[Option], step: Step) -> Plan | None:
        """The longest drafts of the first drafter that has any. If room is short, all are limited equally."""
        free = min(step.room, step.most_rows - sum(step.pending))
        each = max(0, free // len(step.pending))
        for option in options:
            lengths = [
                min(limit, each) if kind else 0
                for kind, limit in zip(option.kinds, option.limits, strict=True)
            ]
            if any(lengths):
                return Plan(option.drafter, lengths)
        return None

    def add(self, drafter: Drafter, kind: str, n: int, tokens: int, seconds: float) -> None:
        """Learns nothing."""
