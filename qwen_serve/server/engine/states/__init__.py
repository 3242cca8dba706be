"""Sequence ids, KV cells and recurrent states: their owners, how they are shared, and rollback of drafts."""

from .cells import CellAllocator, StreamCells
from .deferred_reads import DeferredReads
from .store import SavedState, StateStore
