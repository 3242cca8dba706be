"""Which of llama.cpp's sequence ids serves what. Each id has a recurrent state of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from qwen_serve.server.engine.settings import MAX_SEQUENCES

if TYPE_CHECKING:
    from qwen_serve.server.engine.settings import EngineSettings

MAX_DRAFTING = 16
"""Most sequences that draft from the text at once. A larger batch keeps the device busy with tokens that are
certain."""

MTP_SEQUENCES = 1
"""Most that the MTP head drafts for at once: for more, drafts gain nothing that is sure."""

LONE_SLOTS = 2
"""Slots, the first ones, in which a sequence that decodes alone may go back to snapshots: a copy of it may
take a buffer for another state, which llama.cpp keeps."""


@dataclass(frozen=True, slots=True)
class SequenceIds:
    """Three ranges, one after the other."""

    slots: range
    """Sequences that run."""
    rollback: range
    """What the first slots go back to after a wrong draft: the copy of slot s is `rollback[s]`. Empty where
    ids have cells of their own: their states are copied on the device."""
    checkpoints: range
    """States that the prefix cache keeps."""
    drafting: range
    """Of the slots those that draft."""

    @classmethod
    def of(cls, settings: EngineSettings) -> Self:
        """As many of each as decided settings ask for (`speculation` is not "auto")."""
        slots = range(settings.parallel)
        if settings.speculation == "off":
            drafting = 0
        elif settings.speculation == "mtp" and settings.draft_model is None:
            drafting = max(LONE_SLOTS, MTP_SEQUENCES)
        else:
            drafting = MAX_DRAFTING
        drafting = min(drafting, len(slots), MAX_SEQUENCES - len(slots))
        rollback = range(slots.stop, slots.stop + (0 if settings.deterministic else drafting))
        checkpoints = range(rollback.stop, rollback.stop + settings.prefix_checkpoints)
        return cls(slots, rollback, checkpoints, slots[:drafting])

    def __len__(self) -> int:
        """How many there are: `n_seq_max` of the context."""
        return self.checkpoints.stop

    @property
    def lone(self) -> range:
        """Slots in which a sequence that decodes alone may go back to snapshots; none if nothing drafts."""
        return self.drafting[:LONE_SLOTS]
