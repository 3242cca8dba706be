"""Sequence ids, KV cells, recurrent states: who has them, who shares them, and the way back from a draft."""

from .cells import CellAllocator, StreamCells
from .deferred_reads import DeferredReads
from .store import SavedState, StateStore

__all__ = ["CellAllocator", "DeferredReads", "SavedState", "StateStore", "StreamCells"]
