"""What the slots do, as llama-server tells of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import Engine
    from .sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class SlotState:
    """A slot, and the request that runs in it, if one does: never its text, which is its client's."""

    id: int
    """llama.cpp's sequence id."""
    params: SamplingParams | None = None
    """Of the request; None where the slot is idle."""
    prompt_tokens: int = 0
    processed: int = 0
    """Prompt tokens that were computed."""
    cached: int = 0
    """Those that the prefix cache had."""
    decoded: int = 0
    remain: int = 0
    """Tokens that may still be generated."""


def slot_states(engine: Engine) -> list[SlotState]:
    """Of all slots, as of now, which may be in the middle of a step. From any thread."""
    states = [SlotState(slot) for slot in range(engine.settings.parallel)]
    for sequence in tuple(engine.components.scheduler.running):
        if (slot := sequence.slot) is None:
            continue  # it has just lost it
        read, cached = min(sequence.computed, sequence.prompt_length), sequence.reused or 0
        states[slot] = SlotState(
            slot,
            sequence.sampler.params,
            sequence.prompt_length,
            max(0, read - cached),
            cached,
            sequence.generated,
            sequence.limit - len(sequence.tokens),
        )
    return states
