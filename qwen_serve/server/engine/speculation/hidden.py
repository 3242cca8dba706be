"""The base of drafters that read the trunk's hidden rows. The rows wait on the host and become entries of a
cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_serve.llamacpp import Context
from qwen_serve.llamacpp.errors import LlamaError
from qwen_serve.server.engine.request import Request

from .base import Draft, DraftRequest, Guesses
from .times import GroupMeans


@dataclass(slots=True)
class DraftCacheState:
    """A drafter's state of one sequence id.

    The drafter's cache has entries for the hidden rows of positions `first` to `fed` - 1. `rows` on the host
    are those of positions `start` to `end` - 1, where `start` <= `fed`.
    """

    first: int
    fed: int
    start: int
    end: int
    rows: list[npt.NDArray[Any]] = field(default_factory=list)
    """Read-only pieces of rows [n, width]; for rows that stay on the device, their places [n, 1]."""
    fresh: int = 0
    """First position of the rows that were collected without a gap for this id, and not copied from
    another."""
    length: int | None = None
    """Number of tokens that the id holds after a rollback. The rows from there to `end` will be collected
    again."""

    @property
    def known(self) -> int:
        """Number of tokens that the id holds and whose rows were collected."""
        return self.end if self.length is None else min(self.end, self.length)

    def between(self, start: int, end: int) -> npt.NDArray[Any]:
        """The rows of positions `start` up to `end` - 1: a view if they are in one piece."""
        pieces, at = [], self.end
        for piece in reversed(self.rows):
            at -= len(piece)
            pieces.append(piece[max(0, start - at) : max(0, end - at)])
            if at <= start:
                break
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces[::-1])


@dataclass(frozen=True, slots=True)
class SavedDraftCache:
    """A `DraftCacheState`, and its entries in host memory, or None if it has none."""

    state: DraftCacheState
    cache: npt.NDArray[np.uint8] | None

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        entries = 0 if self.cache is None else self.cache.nbytes
        return entries + sum(piece.nbytes for piece in self.state.rows)


class HiddenDrafter:
    """A drafter with a cache of its own, which is made from the trunk's hidden rows. It has a state for each
    sequence id of llama.cpp. The state store copies, frees and saves these states together with the trunk's.

    Rows of prompts and outputs wait on the host until a sequence drafts, so a sequence that never drafts
    takes no time of the drafter. The last `window` rows are kept. If a drafter has missed more, it starts
    with them and does not see earlier ones.
    """

    name: str
    instant = False
    reads_pictures = True
    """Whether it reads the rows of pictures. If not, it begins after a sequence's last picture."""
    most: int
    kinds: Mapping[str, float]
    """Its only kind of drafts, with the acceptance assumed for a first token before any is measured."""
    layers: tuple[int, ...] = ()
    """Layers of the trunk whose inputs it reads side by side; empty: the rows after the output norm."""

    def __init__(self, context: Context, window: int, slots: int) -> None:
        """Sequence ids below `slots` run; the others hold copies."""
        self.window = window
        self._context, self._slots = context, slots
        self._states: dict[int, DraftCacheState] = {}
        self.lost = 0
        """Number of states that the state store failed to copy, save, restore or free."""
        self._first, self._further, self._ratio = GroupMeans(), GroupMeans(), GroupMeans()
        """Seconds of a draft's first token and of each further one, measured at start; and how many times as
        long drafts take since then. By number of sequences."""
        self._typical = True
        """Whether the last draft had few rows to read, as every draft behind another."""

    def collect(self, slot: int, start: int, rows: npt.NDArray[Any], most: int | None = None) -> None:
        """Keep the rows of correct tokens at positions `start`, `start` + 1...; at most `most` or `window`
        rows. They are [n, n_embd], or what `Context.layer_inputs` returns."""
        state = self._states.setdefault(slot, DraftCacheState(start, start, start, start, fresh=start))
        state.length = None
        if start > state.end:
            state.rows.clear()
            state.end = state.fresh = start
            self._drop_entries(slot, start)
        if not len(new := rows[state.end - start :]):
            return  # these rows were read again after a rejection
        state.rows.append(new)
        state.end += len(new)
        while (surplus := state.end - (most or self.window) - state.start) > 0:
            piece = state.rows.pop(0)
            if len(rest := piece[surplus:]):
                state.rows.insert(0, rest)
            state.start += len(piece) - len(rest)
        if state.start > state.fed:  # it missed some rows
            self._drop_entries(slot, state.start)

    def rolled_back(self, slot: int, length: int) -> None:
        """Record that a slot was rolled back to its first `length` tokens. The rows of later tokens stay
        correct."""
        if (state := self._states.get(slot)) is not None:
            state.length = length

    def pause(self) -> None:
        """Drop the states of slots, which become useless because no rows are collected from now on."""
        for slot in [slot for slot in self._states if slot < self._slots]:
            self.free(slot)

    def can_draft(self, request: DraftRequest) -> bool:
        """Whether the rows of all tokens but the newest were collected."""
        state = self._states.get(request.slot)
        return state is not None and state.first < state.end == len(request.sequence.tokens) - 1

    def begin(self, requests: Sequence[DraftRequest]) -> Guesses:
        """Begin a draft for each request, each with its own sampler and noise. Each must pass `can_draft`.

        Raises NoMemorySlot if the cache is full, LlamaError, or FloatingPointError if its logits are
        unusable. Then the requests' slots start anew.
        """
        raise NotImplementedError

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """The drafts that `begin` begins."""
        return [Draft(tokens, self.name) for tokens in self.begin(requests).read()]

    def cost(self, n: int, depth: int) -> float:
        """Expected seconds of drafts of `depth` tokens for `n` sequences."""
        return (self._first.of(n) + (depth - 1) * self._further.of(n)) * (self._ratio.of(n) or 1.0)

    def took(self, n: int, depth: int, seconds: float) -> None:
        """Record the seconds of the last draft."""
        if self._typical and self._first.of(n):
            self._ratio.add(n, seconds * (self._ratio.of(n) or 1.0) / self.cost(n, depth))

    def forget(self, sequence: Request) -> None:
        """Nothing to do: states belong to sequence ids."""

    # --- states of sequence ids ----------------------------------------------------------------------------

    def copy(self, source: int, target: int) -> None:
        """Copy the state of `source` to `target`, as far back as the copy pays."""
        raise NotImplementedError

    def free(self, sequence_id: int) -> None:
        """Drop the state of a sequence id. Idempotent; must not raise."""
        if sequence_id in self._states:
            self._drop_entries(sequence_id, 0)
            del self._states[sequence_id]

    def clear(self) -> None:
        """Drop all states and clear the contents of the cache."""
        self._states.clear()
        self._context.clear(data=True)

    def save(self, sequence_id: int) -> SavedDraftCache | None:
        """Copy the state of an idle id to host memory; None if it has no state."""
        if (state := self._states.get(sequence_id)) is None:
            return None
        cache = self._context.save(sequence_id) if state.fed > state.first else None
        return SavedDraftCache(replace(state, rows=[*state.rows]), cache)

    def restore(self, sequence_id: int, saved: SavedDraftCache) -> None:
        """Restore a saved state to an id, or nothing if the drafter's cache has no room."""
        self.free(sequence_id)
        if saved.cache is not None:
            try:
                self._context.restore(sequence_id, saved.cache)
            except LlamaError:  # the drafter starts again
                self._context.remove(sequence_id)
                return
        state = saved.state
        self._states[sequence_id] = replace(state, rows=[*state.rows], fresh=state.end)

    def _drop_entries(self, sequence_id: int, start: int) -> None:
        """Empty an id's part of the cache. Its next entries begin with the row of position `start`."""
        state = self._states[sequence_id]
        if state.fed > state.first:
            self._context.remove(sequence_id)
        state.first = state.fed = state.start = start
