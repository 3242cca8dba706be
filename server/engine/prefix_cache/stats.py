"""Counters of the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PrefixStats:
    """A snapshot. Counts run from the start of the engine; the rest is as of now."""

    hits: int = 0
    """Requests that began from a checkpoint."""
    misses: int = 0
    """Requests that began with nothing."""
    tokens_saved: int = 0
    """Prompt tokens that were not computed again."""
    checkpoints: int = 0
    """Taken so far."""
    evictions: int = 0
    """Checkpoints that had to leave the device."""
    restores: int = 0
    """Checkpoints that came back from host memory."""
    failed_copies: int = 0
    """Copies to or from host memory that failed; the checkpoint was lost."""
    resident: int = 0
    """Checkpoints on the device."""
    resident_cells: int = 0
    """KV cells that only checkpoints occupy."""
    resident_bytes: int = 0
    """What the resident checkpoints occupy: those cells, and a recurrent state each."""
    host_checkpoints: int = 0
    host_bytes: int = 0
