"""Drafts from a block drafter (DFlash): all tokens of a draft, and those of all sequences, in one pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from server.engine.errors import LlamaError, NoMemorySlot

from .base import Draft
from .times import Mean, group_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Sequence as ListLike

    import numpy.typing as npt

    from server.engine.draft_spec import DraftSpec
    from server.engine.llama.draft import DraftContext
    from server.engine.sequence import Sequence

    from .base import DraftRequest

KINDS: Mapping[str, float] = {"dflash": 0.85}

FEW = 32
"""Rows to inject for a sequence that drafts all the time, at most: what takes longer happens once."""

KEPT = 512
"""Positions of the drafter's cache that a copy of a sequence id shares, at most."""

RUNNING = 2
"""Windows that a sequence's entries may come to before they are cut back to one."""


@dataclass(slots=True)
class Reading:
    """What the drafter has of one sequence id: entries of positions `first` up to `fed` - 1 in its cache,
    then `rows` of features that wait to be injected, up to position `end` - 1."""

    first: int
    fed: int
    end: int
    rows: list[npt.NDArray[np.float32]] = field(default_factory=list)
    length: int | None = None
    """Tokens that the id itself holds, where that is fewer than `end`: the rest will be read again."""


@dataclass(frozen=True, slots=True)
class SavedReading:
    """Entries of positions `first` up to `end` - 1 in host memory."""

    first: int
    end: int
    cache: npt.NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.cache.nbytes


def cells(settings_window: int, slots: int, checkpoints: int, most: int, block: int) -> int:
    """Cells of the drafter's cache: what slots and checkpoints may hold, and the blocks being guessed."""
    return slots * (RUNNING + 1) * settings_window + checkpoints * min(KEPT, settings_window) + most * block


def host_bytes(slots: int, window: int, n_features: int) -> int:
    """Host memory that rows may take which wait to be injected, at most."""
    return 4 * slots * window * n_features


class DflashDrafter:
    """Injects what the trunk has read, lazily, and has the drafter fill a block of masks.

    What the trunk's layers made of each token waits on the host until the sequence drafts, or its state is
    shared; then it goes into the drafter's cache in one call. The drafter looks back on `window` tokens at
    least and twice as many at most; one that missed more starts anew.
    """

    name = "dflash"
    instant = False

    def __init__(self, context: DraftContext, spec: DraftSpec, window: int, *, slots: int, most: int) -> None:
        """Drafts for `most` sequences at once. Sequence ids below `slots` run; the others hold copies."""
        self.kinds, self.layers, self.window = KINDS, spec.layers, window
        self.depth, self.most = spec.block - 1, most
        self._context, self._block, self._mask, self._slots = context, spec.block, spec.mask, slots
        self._readings: dict[int, Reading] = {}
        self._blocks: dict[int, Mean] = {}
        """Seconds of a pass over blocks, by groups of sequences."""
        self._injections = Mean()
        """Seconds that it takes to inject what came since the draft before."""

    # --- what the trunk does -------------------------------------------------------------------------------

    def wants(self, sequence: Sequence, end: int) -> bool:
        """Whether rows up to position `end` will ever be read: not those far from a prompt's end."""
        return len(sequence.tokens) - end < self.window

    def collect(self, slot: int, start: int, rows: npt.NDArray[np.float32]) -> None:
        """The trunk has read the tokens at `start`, `start` + 1...: their features, to be kept."""
        reading = self._readings.setdefault(slot, Reading(start, start, start))
        reading.length = None
        if start > reading.end:
            self._begin_at(slot, reading, start)
        new = rows[reading.end - start :]
        if not len(new):
            return  # read again after a rejection
        reading.rows.append(new)
        reading.end += len(new)
        if reading.end - reading.fed > self.window:
            waiting = np.concatenate(reading.rows)[-self.window :]
            end = reading.end
            self._begin_at(slot, reading, end - len(waiting))
            reading.rows, reading.end = [waiting], end

    def rolled_back(self, slot: int, length: int) -> None:
        """The slot went back to its first `length` tokens; what was read of those that follow stays right."""
        if (reading := self._readings.get(slot)) is not None:
            reading.length = length

    def pause(self) -> None:
        """There will be a gap: what slots have is of no more use."""
        for slot in [slot for slot in self._readings if slot < self._slots]:
            self.free(slot)

    # --- what becomes of sequence ids ----------------------------------------------------------------------

    def copy(self, source: int, target: int) -> None:
        """`target` shares the newest entries of `source`, KEPT of them at most."""
        self.free(target)
        if (reading := self._readings.get(source)) is None:
            return
        end = reading.end if reading.length is None else min(reading.end, reading.length)
        first = max(reading.first, end - min(KEPT, self.window))
        if first >= end:
            return
        if reading.fed < end:
            self._inject([source])
        self._context.copy(source, target, first, end)
        self._readings[target] = Reading(first, end, end)

    def save(self, sequence_id: int) -> SavedReading | None:
        """The entries of a sequence id that runs nothing, copied to host memory."""
        if (reading := self._readings.get(sequence_id)) is None or reading.fed == reading.first:
            return None
        return SavedReading(reading.first, reading.fed, self._context.save(sequence_id))

    def restore(self, sequence_id: int, saved: object | None) -> None:
        """Put what was saved into an id; nothing of it where the drafter's cache has no room."""
        self.free(sequence_id)
        if not isinstance(saved, SavedReading):
            return
        try:
            self._context.restore(sequence_id, saved.cache)
        except LlamaError:  # it begins anew
            self._context.remove(sequence_id)
        else:
            self._readings[sequence_id] = Reading(saved.first, saved.end, saved.end)

    def free(self, sequence_id: int) -> None:
        """Nothing is known of a sequence id any more. Idempotent."""
        if (reading := self._readings.pop(sequence_id, None)) is not None and reading.fed > reading.first:
            self._context.remove(sequence_id)

    def forget(self, sequence: Sequence) -> None:
        """Nothing to do: what is known belongs to sequence ids."""

    def _begin_at(self, slot: int, reading: Reading, start: int) -> None:
        if reading.fed > reading.first:
            self._context.remove(slot)
        reading.first = reading.fed = reading.end = start
        reading.rows.clear()

    # --- drafting ------------------------------------------------------------------------------------------

    def can_draft(self, request: DraftRequest) -> bool:
        """Whether the features of all tokens but the newest are there."""
        reading = self._readings.get(request.slot)
        if reading is None or reading.end != len(request.sequence.tokens) - 1:
            return False
        return reading.end > reading.first

    def cost(self, n: int, depth: int) -> float:
        """One pass, however deep, and the injection before it."""
        if not self._blocks:
            return 0.0
        group = min(self._blocks, key=lambda known: abs(known - group_of(max(1, n))))
        return self._blocks[group].value + self._injections.value

    def propose(self, requests: ListLike[DraftRequest]) -> list[Draft]:
        """Fill a block for each, all together. Each request must pass `can_draft`.

        Raises what llama.cpp did: NoMemorySlot where the drafter's cache is full, LlamaError,
        FloatingPointError where its logits are no use. Then every sequence begins anew.
        """
        slots = [request.slot for request in requests]
        waiting = sum(self._readings[slot].end - self._readings[slot].fed for slot in slots)
        try:
            started = perf_counter()
            self._inject(slots)
            injected = perf_counter()
            drafts = self._fill(requests)
        except Exception:
            self._readings.clear()
            self._context.clear()
            raise
        if waiting <= FEW * len(slots):
            self._injections.add(injected - started)
        self._blocks.setdefault(group_of(len(slots)), Mean()).add(perf_counter() - injected)
        return drafts

    def measure(self) -> None:
        """Time blocks for one sequence and for more of them: of nothing, which takes as long as any."""
        n = 1
        while n <= min(self.most, self._slots):
            for _ in range(4 if n == 1 else 2):
                started = perf_counter()
                self._put_blocks([(slot, 0, 0) for slot in range(n)])
                self._blocks.setdefault(n, Mean()).add(perf_counter() - started)
                self._context.clear()
            n *= 2

    def _fill(self, requests: ListLike[DraftRequest]) -> list[Draft]:
        starts = [len(request.sequence.tokens) - 1 for request in requests]
        guesses = self._put_blocks(
            [(r.slot, start, r.sequence.tokens[-1]) for r, start in zip(requests, starts, strict=True)]
        )
        for request, start in zip(requests, starts, strict=True):
            self._context.remove(request.slot, start)
        return [Draft(g[: r.limit], self.name) for g, r in zip(guesses, requests, strict=True)]

    def _put_blocks(self, wanted: ListLike[tuple[int, int, int]]) -> list[list[int]]:
        """The `depth` tokens that are guessed behind `newest`, which is at `start`: (slot, start, newest)."""
        context, block = self._context, self._block
        n = len(wanted) * block
        context.tokens[:n], context.outputs[:n] = (
            self._mask,
            1,
        )  # the graph reads out every row, or the wrong ones
        for number, (slot, start, newest) in enumerate(wanted):
            at = number * block
            context.tokens[at] = newest
            context.positions[at : at + block] = np.arange(start, start + block)
            context.sequences[at : at + block] = slot
        context.decode(n)
        tokens, _ = context.best(context.sequences[:n].tolist(), range(n))
        return [tokens[at + 1 : at + block] for at in range(0, n, block)]

    def _inject(self, ids: Iterable[int]) -> None:
        """Bring the cache up to date for these ids, in as few calls as there is room for."""
        context = self._context
        n = 0
        for sequence_id in ids:
            reading = self._readings[sequence_id]
            for rows in reading.rows:
                start = 0
                while start < len(rows):
                    if n == context.n_batch:
                        n = self._flush(n)
                    part = rows[start : start + context.n_batch - n]
                    end = n + len(part)
                    context.features[n:end] = part
                    context.positions[n:end] = np.arange(reading.fed, reading.fed + len(part))
                    context.sequences[n:end] = sequence_id
                    reading.fed += len(part)
                    n, start = end, start + len(part)
            reading.rows.clear()
        self._flush(n)
        for sequence_id in ids:
            reading = self._readings[sequence_id]
            if reading.fed - reading.first > RUNNING * self.window:
                context.remove(sequence_id, reading.first, reading.fed - self.window)
                reading.first = reading.fed - self.window

    def _flush(self, n: int) -> int:
        if n:
            try:
                self._context.inject(n)
            except NoMemorySlot:  # copies that wait for a request to come make room
                held = [sequence_id for sequence_id in self._readings if sequence_id >= self._slots]
                if not held:
                    raise
                for sequence_id in held:
                    self.free(sequence_id)
                self._context.inject(n)
        return 0
