"""Sequence ids, KV cells, recurrent states: who has them, who shares them, and rollback of drafts."""

from .cells import CellAllocator, StreamCells
from .deferred_reads import DeferredReads
from .store import SavedState, StateStore

__all__ = ["CellAllocator", "DeferredReads", "SavedState", "StateStore", "StreamCells"]
