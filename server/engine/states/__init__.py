"""Sequence ids, KV cells, recurrent states: who has them, who shares them, and the way back from a draft."""

from .backlog import Backlog
from .cells import CellAllocator, StreamCells
from .store import SavedState, StateStore

__all__ = ["Backlog", "CellAllocator", "SavedState", "StateStore", "StreamCells"]
