"""What llama.cpp's sequence ids are used for. Each id has a recurrent state of its own."""

from dataclasses import dataclass
from typing import Self

from qwen_serve.server.engine.settings import MAX_SEQUENCES, EngineSettings

TEXT_DRAFTING = 16
"""Maximum sequences that draft from the text at once, if `draft_parallel` is not larger: larger batches keep
the device busy without drafts."""

LONE_SLOTS = 2
"""Number of first slots in which a sequence that decodes alone may roll back to snapshots. They are few,
because copying such a sequence may take a buffer of one state, which llama.cpp keeps for each."""


@dataclass(frozen=True, slots=True)
class SequenceIds:
    """Three ranges, one after the other."""

    slots: range
    """Ids of running sequences."""
    rollback: range
    """Rollback copies of the first slots: the copy of slot s is `rollback[s]`. With operands only a lone
    sequence's longer drafts need one. Empty if ids have cells of their own: then states are copied on the
    device."""
    checkpoints: range
    """Ids of the prefix cache's states."""
    drafting: range
    """The slots that draft."""

    @classmethod
    def of(cls, settings: EngineSettings) -> Self:
        """The ranges for resolved settings (`speculation` is not "auto")."""
        slots = range(settings.parallel)
        many = settings.draft_always or settings.speculation not in ("mtp", "draft")
        fewest = TEXT_DRAFTING if many else LONE_SLOTS
        drafting = 0 if settings.speculation == "off" else max(fewest, settings.draft_parallel)
        drafting = min(drafting, len(slots), MAX_SEQUENCES - len(slots))
        copies = 0 if settings.deterministic else min(drafting, LONE_SLOTS) if settings.operands else drafting
        rollback = range(slots.stop, slots.stop + copies)
        checkpoints = range(rollback.stop, rollback.stop + settings.prefix_checkpoints)
        return cls(slots, rollback, checkpoints, slots[:drafting])

    def __len__(self) -> int:
        """Number of ids: `n_seq_max` of the context."""
        return self.checkpoints.stop

    @property
    def lone(self) -> range:
        """Slots in which a sequence that decodes alone may roll back to snapshots; empty if nothing
        drafts."""
        return self.drafting[:LONE_SLOTS]
