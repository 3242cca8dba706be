"""What drafters share that read the trunk's hidden rows: rows that wait on the host, entries in a cache."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from qwen_serve.llamacpp.errors import LlamaError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from qwen_serve.llamacpp import Context
    from qwen_serve.server.engine.sequence import Sequence

    from .base import DraftRequest


@dataclass(slots=True)
class DraftCacheState:
    """What a drafter has of one sequence id: entries made of the rows of positions `first` up to `fed` - 1 in
    its cache, and on the host `rows`, those of positions `start` up to `end` - 1, where `start` <= `fed`."""

    first: int
    fed: int
    start: int
    end: int
    rows: list[npt.NDArray[Any]] = field(default_factory=list)
    """Pieces [n, width] that nobody writes to: of rows, or [n, 1] of where they stay on the device."""
    fresh: int = 0
    """Position from which on the rows were collected for this very id, one after the other."""
    length: int | None = None
    """Tokens that the id itself holds, where that is fewer than `end`: the rest will be read again."""

    @property
    def known(self) -> int:
        """Tokens that the id holds, and of which there was a row."""
        return self.end if self.length is None else min(self.end, self.length)

    def between(self, start: int, end: int) -> npt.NDArray[Any]:
        """The rows of positions `start` up to `end` - 1, in an array of their own."""
        pieces, at = [], self.end
        for piece in reversed(self.rows):
            at -= len(piece)
            pieces.append(piece[max(0, start - at) : max(0, end - at)])
            if at <= start:
                break
        return np.concatenate(pieces[::-1])


@dataclass(frozen=True, slots=True)
class SavedDraftCache:
    """A `DraftCacheState`, and its entries in host memory; None where there are none."""

    state: DraftCacheState
    cache: npt.NDArray[np.uint8] | None

    @property
    def nbytes(self) -> int:
        """Its size."""
        entries = 0 if self.cache is None else self.cache.nbytes
        return entries + sum(piece.nbytes for piece in self.state.rows)


class HiddenDrafter:
    """A drafter with a cache of its own, made of the trunk's hidden rows: a state for each sequence id of
    llama.cpp, which the state store copies, frees and saves with the trunk's.

    Rows of prompts and outputs wait on the host until a sequence drafts; a sequence that never does costs the
    drafter nothing. `window` rows are kept: a drafter that missed more starts anew there, and sees no further
    back.
    """

    instant = False
    reads_pictures = True
    """Whether it drafts for sequences with pictures; else it is given no rows of them, and is never ready."""
    most: int
    kinds: Mapping[str, float]
    """Its only kind of drafts; the chance of a first token that is assumed before anything is known."""
    layers: tuple[int, ...] = ()
    """Of the trunk, whose inputs it reads side by side; none for the rows after the output norm."""

    def __init__(self, context: Context, window: int, slots: int) -> None:
        """Sequence ids below `slots` run; the others hold copies."""
        self.window = window
        self._context, self._slots = context, slots
        self._states: dict[int, DraftCacheState] = {}
        self.lost = 0
        """States that the state store could not copy, save, restore or free."""

    def collect(self, slot: int, start: int, rows: npt.NDArray[Any]) -> None:
        """The trunk has read the right tokens at `start`, `start` + 1...: their rows, [n, n_embd] or as
        `Context.layer_inputs` gives them, at most `window` of them, to be kept."""
        state = self._states.setdefault(slot, DraftCacheState(start, start, start, start, fresh=start))
        state.length = None
        if start > state.end:
            state.rows.clear()
            state.end = state.fresh = start
            self._drop_entries(slot, start)
        if not len(new := rows[state.end - start :]):
            return  # read again after a rejection
        state.rows.append(new)
        state.end += len(new)
        while (surplus := state.end - self.window - state.start) > 0:
            piece = state.rows.pop(0)
            if len(rest := piece[surplus:]):
                state.rows.insert(0, rest)
            state.start += len(piece) - len(rest)
        if state.start > state.fed:  # it missed some
            self._drop_entries(slot, state.start)

    def rolled_back(self, slot: int, length: int) -> None:
        """The slot went back to its first `length` tokens; what was read of those that follow stays right."""
        if (state := self._states.get(slot)) is not None:
            state.length = length

    def pause(self) -> None:
        """From now on there are no rows: what slots have of them is of no more use."""
        for slot in [slot for slot in self._states if slot < self._slots]:
            self.free(slot)

    def can_draft(self, request: DraftRequest) -> bool:
        """Whether the rows of all tokens but the newest are there."""
        state = self._states.get(request.slot)
        return state is not None and state.first < state.end == len(request.sequence.tokens) - 1

    def forget(self, sequence: Sequence) -> None:
        """Nothing to do: what is known belongs to sequence ids."""

    # --- what becomes of sequence ids ----------------------------------------------------------------------

    def copy(self, source: int, target: int) -> None:
        """`target` becomes what `source` is, as far back as is worth it."""
        raise NotImplementedError

    def free(self, sequence_id: int) -> None:
        """Nothing is known of a sequence id any more. Idempotent; must not raise."""
        if sequence_id in self._states:
            self._drop_entries(sequence_id, 0)
            del self._states[sequence_id]

    def clear(self) -> None:
        """All ids are empty: nothing is left in their entries, either."""
        self._states.clear()
        self._context.clear(data=True)

    def save(self, sequence_id: int) -> SavedDraftCache | None:
        """What is known of an id that runs nothing, its entries in host memory; None if nothing is."""
        if (state := self._states.get(sequence_id)) is None:
            return None
        cache = self._context.save(sequence_id) if state.fed > state.first else None
        return SavedDraftCache(replace(state, rows=[*state.rows]), cache)

    def restore(self, sequence_id: int, saved: SavedDraftCache) -> None:
        """Put what was saved into an id; nothing of it where the drafter's cache has no room."""
        self.free(sequence_id)
        if saved.cache is not None:
            try:
                self._context.restore(sequence_id, saved.cache)
            except LlamaError:  # it begins anew
                self._context.remove(sequence_id)
                return
        state = saved.state
        self._states[sequence_id] = replace(state, rows=[*state.rows], fresh=state.end)

    def _drop_entries(self, sequence_id: int, start: int) -> None:
        """Its cache is emptied; what comes next begins with the row of position `start`."""
        state = self._states[sequence_id]
        if state.fed > state.first:
            self._context.remove(sequence_id)
        state.first = state.fed = state.start = start
