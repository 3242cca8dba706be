"""What is known of a step's drafts while it is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .health import DrafterHealth
    from .policy import Plan


@dataclass(slots=True)
class Proposal:
    """The drafts of the batch that is being computed."""

    health: DrafterHealth
    """The drafter that made them."""
    plan: Plan
    kinds: list[str]
    """The kind of draft of each chunk; "" for a chunk without a draft."""
    exceeds_snapshots: bool
    """Whether a draft is longer than a snapshot can roll back."""
    rollback: float
    """Seconds for the checkpoint and the rollback to it."""
