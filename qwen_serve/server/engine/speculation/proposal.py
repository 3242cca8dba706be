"""What is known of a step's drafts while it is computed."""

from dataclasses import dataclass

from .health import DrafterHealth


@dataclass(slots=True)
class Proposal:
    """The drafts of the batch that is being computed."""

    health: DrafterHealth
    """The drafter that made them."""
    kinds: list[str]
    """The kind of draft of each chunk; "" for a chunk without a draft."""
    exceeds_snapshots: bool
    """Whether a draft is longer than a snapshot can roll back."""
    rollback: float
    """Seconds for the checkpoint and the rollback to it."""
    started: float
    """When it was begun, by the clock of steps."""
    seconds: float = 0.0
    """Seconds that making the drafts took."""
