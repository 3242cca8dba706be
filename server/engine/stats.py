"""Counters of the engine, for whoever watches it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .prefix_cache import PrefixStats

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .profile import StepTotals
    from .speculation import DrafterStats


@dataclass(frozen=True)
class ImageStats:
    """Of pictures in prompts."""

    encoded: int = 0
    cached: int = 0
    """Those that came again and were known."""
    bytes: int = 0
    """Of rows, those that requests hold and those that are kept for when they come again."""


@dataclass(frozen=True)
class EngineStats:
    """A snapshot. Counts run from the start of the engine; the rest is as of now."""

    running: int
    waiting: int
    steps: int
    prompt_tokens: int
    """Tokens of prompts computed, those that preemption made it compute again included."""
    generated_tokens: int
    preemptions: int
    kv_cells_used: int
    """Those of checkpoints in the prefix cache included."""
    kv_cells: int
    tiers: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """By service tier: requests that wait, and what requests have cost, in prompt tokens' worth of time."""
    prefix: PrefixStats = field(default_factory=PrefixStats)
    sampler_changes: int = 0
    """How often a slot had to be given another way of sampling on the device, which holds a step up."""
    step_totals: tuple[StepTotals, ...] = ()
    """Where the time of steps went."""
    drafts: Mapping[str, DrafterStats] = field(default_factory=dict)
    """What became of draft tokens, by drafter, and whether it drafts; none where speculation is off."""
    images: ImageStats = field(default_factory=ImageStats)
    finished: dict[str, int] = field(default_factory=dict)
    """Requests by how they ended: stop, length, cancelled, error."""
