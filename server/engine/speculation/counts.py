"""What becomes of drafts, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DraftCounts:
    """For one request, or for one drafter and all requests."""

    steps: int = 0
    """Steps that verified a draft."""
    drafted: int = 0
    """Tokens in those drafts."""
    accepted: int = 0
    """Those that were right."""

    def add(self, drafted: int, accepted: int) -> None:
        """A step verified a draft."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted

    @property
    def mean_accepted(self) -> float:
        """Accepted tokens a draft."""
        return self.accepted / self.steps if self.steps else 0.0
