"""The engine's counters, for monitoring."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .prefix_cache import PrefixStats
from .profile import StepTotals
from .speculation import DrafterStats


@dataclass(frozen=True)
class ImageStats:
    """Counters of pictures in prompts."""

    encoded: int = 0
    cached: int = 0
    """Pictures found in the cache."""
    bytes: int = 0
    """Bytes of the rows that requests hold and of cached rows."""


@dataclass(frozen=True)
class EngineStats:
    """A snapshot. Counts run from the engine's start; the rest is the current state."""

    running: int
    waiting: int
    steps: int
    prompt_tokens: int
    """Prompt tokens computed, including those computed again after a preemption."""
    generated_tokens: int
    preemptions: int
    kv_cells_used: int
    """Including cells of the prefix cache's checkpoints."""
    kv_cells: int
    tiers: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """By service tier: waiting requests, and the cost of all requests in prompt tokens' worth of time."""
    prefix: PrefixStats = field(default_factory=PrefixStats)
    step_totals: tuple[StepTotals, ...] = ()
    """Time of steps by phase."""
    drafts: Mapping[str, DrafterStats] = field(default_factory=dict)
    """Draft counts and state by drafter; empty if speculation is off."""
    images: ImageStats = field(default_factory=ImageStats)
    finished: dict[str, int] = field(default_factory=dict)
    """Requests by finish reason: stop, length, cancelled, error."""
