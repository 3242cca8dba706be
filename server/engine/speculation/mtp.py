"""Drafts from the checkpoint's own multi-token-prediction head."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from server.engine.errors import LlamaError, NoMemorySlot

from .acceptance import doubt

if TYPE_CHECKING:
    from collections.abc import Sequence as ListLike

    import numpy.typing as npt

    from server.engine.llama.mtp import MtpContext
    from server.engine.sequence import Sequence

    from .base import Floors, Order
    from .times import DraftTimes

log = logging.getLogger(__name__)


FEW = 24
"""Tokens to catch up on for a sequence that drafts all the time, at most."""

WIDEST = 5
"""Rows up to which every call of a draft for a lone sequence is made as wide as the widest, with tokens that
go again. Calls of one width find llama.cpp's graph as they need it; to build one took an H200 0.2 to 0.3 ms,
another row 0.02 (`python -m server.engine.speculation.cost`)."""

KEPT = 128
"""Hidden rows that a copy of a sequence id takes along, of those that the head has not used."""


@dataclass(slots=True)
class Reading:
    """What the head has of one sequence id.

    Its cache holds the entries of positions up to `fed` - 1; `buffer` begins with the trunk's hidden rows of
    positions `first` up to `end` - 1. The entry of position p takes the row of p - 1, so `first` is less than
    `fed` or, before anything was fed, the beginning of what is known.
    """

    buffer: npt.NDArray[np.float32]
    fed: int = 0
    first: int = 0
    end: int = 0
    oldest: int = 0
    """The first position of which its cache may still have the entry."""
    depth: int | None = None
    """Tokens that the id itself holds, where that is fewer than `end`: the rest will be read again."""

    @property
    def rows(self) -> npt.NDArray[np.float32]:
        """Those that are there: [n, n_embd]."""
        return self.buffer[: self.end - self.first]


@dataclass(frozen=True, slots=True)
class SavedReading:
    """A `Reading` in host memory: hidden rows [n, n_embd] from position `first` on, and the head's cache."""

    rows: npt.NDArray[np.float32]
    first: int
    fed: int
    oldest: int
    cache: npt.NDArray[np.uint8] | None
    """None where nothing was fed."""

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.rows.nbytes + (0 if self.cache is None else self.cache.nbytes)


class MtpDrafter:
    """Feeds the head what the trunk has read, lazily, and has it guess on.

    Hidden rows of prompts and outputs are kept on the host until a sequence drafts; then the head reads all
    of them in the call that makes the first guess. A sequence that never drafts costs it nothing. At least
    `window` rows are kept: a head that missed more starts anew there, and sees no further back.
    """

    name = "mtp"

    def __init__(
        self, context: MtpContext, window: int, times: DraftTimes, *, span: int = 2**31, widest: int = 0
    ) -> None:
        """The head looks back on `span` tokens of a sequence at most, and on half of them in any case.

        Calls for a lone sequence are all of one width if that is at most `widest`, see WIDEST.
        """
        self._context, self._window, self._span, self._widest = context, window, span, widest
        self.times = times
        self._readings: dict[int, Reading] = {}
        self._caught_up = 0
        """Tokens that the head read before its last drafts."""
        self.read_a_prompt = False
        """Whether these were what a prompt left, which is read once, whatever is planned."""
        self._width = 0
        """Rows of each call of the draft being made; 0 for as many as there are tokens."""
        self._free: list[npt.NDArray[np.float32]] = []
        """Buffers of ids that were removed: fresh memory costs more than what is written to it."""

    # --- what the trunk does -------------------------------------------------------------------------------

    def collect(self, slot: int, start: int, rows: npt.NDArray[np.float32]) -> None:
        """The trunk has read the tokens at `start`, `start` + 1...: their hidden rows [n, n_embd], copied."""
        reading = self._readings.get(slot)
        if reading is None:
            reading = self._readings[slot] = Reading(self._buffer())
        reading.depth = None
        used = reading.end - reading.first
        if start == reading.end and len(rows) == 1 and used < len(reading.buffer):  # as in most steps
            reading.buffer[used] = rows[0]
            reading.end += 1
            return
        if start > reading.end:
            self._forget_cache(slot, reading)
            reading.first = reading.end = start
        end = start + len(rows)
        if end <= reading.end:
            return  # read again after a rejection
        self._append(reading, rows[reading.end - start :])
        if reading.fed and reading.first > reading.fed - 1:
            self._forget_cache(slot, reading)

    def ahead(self, slot: int, depth: int) -> None:
        """The slot went back to its first `depth` tokens; what was read of those that follow stays right."""
        if (reading := self._readings.get(slot)) is not None:
            reading.depth = depth

    def wants(self, sequence: Sequence, end: int) -> bool:
        """Whether rows up to position `end` will ever be read: not those far from a prompt's end."""
        return len(sequence.tokens) - end < self._window

    def copy(self, source: int, target: int) -> None:
        """`target` becomes what `source` is, but for unused rows further back than KEPT."""
        self.remove(target)
        if (reading := self._readings.get(source)) is None:
            return
        end = reading.end if reading.depth is None else min(reading.end, reading.depth)
        fed = min(reading.fed, end)
        first = max(min(reading.first, end), end - KEPT)
        if fed and first > fed - 1:
            fed = 0
        copied = self._readings[target] = Reading(self._buffer(), fed, first, end, reading.oldest)
        copied.rows[:] = reading.buffer[first - reading.first : end - reading.first]
        if fed:
            self._context.copy(source, target)
            if fed < reading.fed:
                self._context.remove(target, fed)

    def save(self, sequence_id: int) -> SavedReading | None:
        """What is known of a sequence id that runs nothing, copied to host memory."""
        if (reading := self._readings.get(sequence_id)) is None:
            return None
        cache = self._context.save(sequence_id) if reading.fed else None
        return SavedReading(reading.rows.copy(), reading.first, reading.fed, reading.oldest, cache)

    def restore(self, sequence_id: int, saved: SavedReading) -> None:
        """Put what was saved into an empty id; nothing of it where the head's cache has no room."""
        if saved.cache is not None:
            try:
                self._context.restore(sequence_id, saved.cache)
            except LlamaError as error:
                log.debug("the head begins anew: %s", error)
                self._context.remove(sequence_id)
                return
        end = saved.first + len(saved.rows)
        reading = Reading(self._buffer(), saved.fed, saved.first, end, saved.oldest)
        reading.rows[:] = saved.rows
        self._readings[sequence_id] = reading

    def remove(self, sequence_id: int) -> None:
        """Nothing is known of a sequence id any more. Idempotent."""
        if (reading := self._readings.pop(sequence_id, None)) is not None:
            self._free.append(reading.buffer)
            if reading.fed:
                self._context.remove(sequence_id)

    def _buffer(self) -> npt.NDArray[np.float32]:
        if self._free:
            return self._free.pop()
        return np.empty((2 * self._window, self._context.beside.shape[1]), np.float32)

    def _append(self, reading: Reading, new: npt.NDArray[np.float32]) -> None:
        buffer, window, n = reading.buffer, self._window, len(new)
        used = reading.end - reading.first
        reading.end += n
        if n >= window:
            buffer[:window] = new[n - window :]
            reading.first = reading.end - window
            return
        if used + n > len(buffer):
            kept = window - n
            buffer[:kept] = buffer[used - kept : used].copy()
            reading.first, used = reading.end - window, kept
        buffer[used : used + n] = new

    def can_draft(self, sequence: Sequence) -> bool:
        """Whether the trunk's rows of all tokens but the newest are there."""
        reading = self._readings.get(-1 if sequence.slot is None else sequence.slot)
        if reading is None or reading.end != len(sequence.tokens) - 1:
            return False
        return (reading.fed or reading.first + 1) <= reading.end

    # --- drafting ------------------------------------------------------------------------------------------

    def propose(self, orders: ListLike[Order], floors: Floors | None = None) -> None:
        """Draft greedily; the orders stay empty when the head's cache is full or its logits are no use.

        All sequences draft together, one token a round, each up to its limit; they stop when the right tokens
        that one more round promises are below the floors. Each sequence must pass `can_draft`.
        """
        alive = [order for order in orders if order.limit > 0]
        if not alive:
            return
        started = perf_counter()
        try:
            rounds = self._draft(alive, floors)
            self.read_a_prompt = self._caught_up > FEW * len(alive)
            if not self.read_a_prompt:
                seconds = perf_counter() - started - rounds * self.times.of(len(alive))
                self.times.besides.add(max(0.0, seconds))
        except (NoMemorySlot, FloatingPointError) as error:
            log.debug("no drafts: %s", error)
            busy = {order.slot for order in alive}
            for idle in self._readings.keys() - busy:  # they go on from the rows that they still have
                self._forget_cache(idle, self._readings[idle])
            for order in alive:
                self.remove(order.slot)
                self._context.remove(order.slot)  # what was fed before it failed
                order.tokens.clear()
                order.sure.clear()

    def forget(self, sequence: Sequence) -> None:
        """Nothing to do: what is known belongs to slots, see `remove`."""

    def measure(self, most: int) -> None:
        """Time drafts of 1, 2, 4... up to `most` sequences: of nothing, which takes as long as any."""
        context, n = self._context, 1
        while n <= most:
            for position in range(4):
                started = perf_counter()
                context.tokens[:n], context.positions[:n] = 0, position
                context.sequences[:n], context.outputs[:n] = range(n), 1
                context.decode(n)
                context.best(range(n), range(n))
                context.beside[:n] = context.hidden(n)
                self.times.add(n, perf_counter() - started)
            context.clear()
            n *= 2

    def _draft(self, alive: list[Order], floors: Floors | None) -> int:
        """Returns the number of decodes."""
        deepest = max(order.limit for order in alive)
        self._width = deepest + 1 if len(alive) == 1 and deepest < self._widest else 0
        drafting, rows = alive, self._catch_up(alive)
        for depth in range(deepest):
            started = perf_counter()
            tokens, confidence = self._context.best([order.slot for order in alive], rows)
            for order, token, sure in zip(alive, tokens, confidence, strict=True):
                order.tokens.append(token)
                order.sure.append(sure)
                order.drafter = self.name
                order.chance *= max(0.0, 1 - order.errors * doubt(sure))
            # the first is verified whatever the head thinks of it, or nobody would learn what that is worth
            if depth and floors is not None and sum(order.chance for order in alive) < floors.keep[depth]:
                for order in alive:
                    order.tokens.pop()
                break
            going_on = [k for k, order in enumerate(alive) if order.limit > depth + 1]
            promised = sum(alive[k].chance * _at(alive[k].typical, depth + 1) for k in going_on)
            if not going_on or (floors is not None and promised < floors.go_on[depth + 1]):
                break
            rows = self._next_round(alive, rows, going_on, tokens)
            alive = [alive[k] for k in going_on]
            if depth:
                self.times.add(len(rows), perf_counter() - started)
        if depth or self._width:  # guesses' entries go: the trunk's own rows make those that come true
            for order in drafting:
                self._context.remove(order.slot, len(order.sequence.tokens))
        return depth + 1

    def _catch_up(self, orders: ListLike[Order]) -> list[int]:
        """Feed what the head has not read; returns the batch indices of the newest tokens."""
        context = self._context
        feeds = []
        for order in orders:
            reading, tokens = self._readings[order.slot], order.sequence.tokens
            if not reading.fed:
                reading.oldest = reading.first + 1
            first = reading.fed or reading.first + 1
            hidden = reading.rows[first - 1 - reading.first :]
            feeds.append((order.slot, first, tokens[first:], hidden))
        total = sum(len(tokens) for _, _, tokens, _ in feeds)
        if total > context.n_batch:  # all but the newest tokens first, piece by piece
            for slot, first, tokens, hidden in feeds:
                for start in range(0, len(tokens) - 1, context.n_batch):
                    end = min(start + context.n_batch, len(tokens) - 1)
                    self._put(0, slot, first + start, tokens[start:end], hidden[start:end])
                    context.outputs[: end - start] = 0
                    context.decode(end - start)
            feeds = [(slot, first + len(t) - 1, t[-1:], h[-1:]) for slot, first, t, h in feeds]
        rows, n = [], 0
        for slot, first, tokens, hidden in feeds:
            self._put(n, slot, first, tokens, hidden)
            n += len(tokens)
            context.outputs[n - len(tokens) : n] = 0
            context.outputs[n - 1] = 1
            rows.append(n - 1)
        self._decode(n)
        self._caught_up = total
        for order in orders:  # the last row stays, in case the newest token is taken back
            reading = self._readings[order.slot]
            reading.buffer[0] = reading.rows[-1]
            reading.fed, reading.first = len(order.sequence.tokens), reading.end - 1
            if reading.fed - reading.oldest > self._span:
                context.remove(order.slot, reading.oldest, reading.fed - self._span // 2)
                reading.oldest = reading.fed - self._span // 2
        return rows

    def _next_round(
        self, alive: list[Order], rows: list[int], going_on: list[int], tokens: list[int]
    ) -> list[int]:
        """Feed the tokens just drafted, each beside the head's own hidden row of the one before."""
        context, n = self._context, len(going_on)
        if self._width:  # every row is an output; what follows the one that counts makes room
            context.beside[:1] = context.hidden(self._width)[rows]
            [order] = alive
            context.remove(order.slot, len(order.sequence.tokens) + len(order.tokens) - 1)
        else:
            context.beside[:n] = context.hidden(len(alive))[going_on]
        for index, k in enumerate(going_on):
            order = alive[k]
            context.tokens[index] = tokens[k]
            context.positions[index] = len(order.sequence.tokens) + len(order.tokens) - 1
            context.sequences[index] = order.slot
        context.outputs[:n] = 1
        self._decode(n)
        return list(range(n))

    def _decode(self, n: int) -> None:
        """Decode the first `n` tokens, and if there is a width so many, all of them outputs."""
        context, width = self._context, self._width
        if n > width:  # the first draft after a prompt
            self._width = 0
        elif width:
            context.tokens[n:width], context.sequences[n:width] = context.tokens[n - 1], context.sequences[0]
            context.positions[n:width] = context.positions[n - 1] + np.arange(1, width - n + 1)
            context.beside[n:width] = context.beside[n - 1]
            context.outputs[:width] = 1
        context.decode(max(n, width))

    def _put(
        self, at: int, slot: int, first: int, tokens: list[int], hidden: npt.NDArray[np.float32]
    ) -> None:
        context, end = self._context, at + len(tokens)
        context.tokens[at:end] = tokens
        context.positions[at:end] = np.arange(first, first + len(tokens))
        context.sequences[at:end] = slot
        context.beside[at:end] = hidden

    def _forget_cache(self, slot: int, reading: Reading) -> None:
        if reading.fed:
            self._context.remove(slot)
            reading.fed = 0


def _at(chances: tuple[float, ...], depth: int) -> float:
    return chances[depth] if depth < len(chances) else 1.0
