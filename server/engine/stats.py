"""Counters of the engine, for whoever watches it."""

from __future__ import annotations

from dataclasses import dataclass, field

from .prefix_cache import PrefixStats


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
    prefix: PrefixStats = field(default_factory=PrefixStats)
    finished: dict[str, int] = field(default_factory=dict)
    """Requests by how they ended: stop, length, cancelled, error."""
