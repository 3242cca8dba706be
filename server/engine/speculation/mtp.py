"""Drafts from the checkpoint's own multi-token-prediction head."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from server.engine.errors import LlamaError

from .base import Draft
from .times import Mean

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as ListLike

    import numpy.typing as npt

    from server.engine.llama.mtp import MtpContext
    from server.engine.sequence import Sequence

    from .base import DraftRequest

MOST = 1
"""Sequences that it drafts for at once. For eight, an H200 gave 743, 731 and 715 tok/s with the head beside
749, 767 and 720 without; for two and four, 433 and 1,356 beside 443 and 688 where every draft is right, 460
and 691 beside 435 and 701 where 80% are (synthetic model, one run each)."""

KINDS: Mapping[str, float] = {"mtp": 0.7}

FEW = 24
"""Tokens to catch up on for a sequence that drafts all the time, at most."""

WIDEST = 5
"""Rows up to which every call of a draft for a lone sequence is made as wide as the widest, with tokens that
go again. Calls of one width find llama.cpp's graph as they need it; to build one took an H200 0.2 to 0.3 ms,
another row 0.02."""

KEPT = 128
"""Hidden rows that a copy of a sequence id takes along, of those that the head has not used."""


def host_bytes(slots: int, checkpoints: int, window: int, n_embd: int) -> int:
    """Host memory that hidden rows may take, at most, with a window of `window` tokens."""
    buffers = 2 * MOST * 2 * window  # of those that draft, and spare ones
    return 4 * n_embd * ((slots + checkpoints) * KEPT + buffers)


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
    length: int | None = None
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
    instant = False
    most = MOST
    layers: tuple[int, ...] = ()

    def __init__(
        self,
        context: MtpContext,
        window: int,
        *,
        depth: int,
        slots: int,
        span: int = 2**31,
        widest: int = 0,
    ) -> None:
        """Drafts of at most `depth` tokens. Sequence ids below `slots` run; the others hold copies.

        The head looks back on `span` tokens of a sequence at most, and on half of them in any case. Calls for
        a lone sequence are all of one width if that is at most `widest`, see WIDEST.
        """
        self.depth, self.kinds = depth, KINDS
        self._context, self.window, self._span, self._widest = context, window, span, widest
        self._slots = slots
        self._readings: dict[int, Reading] = {}
        self._width = 0
        """Rows of each call of the draft being made; 0 for as many as there are tokens."""
        self._spare: list[npt.NDArray[np.float32]] = []
        """Buffers of slots that were emptied: fresh memory costs more than what is written to it."""
        self._decodes: dict[int, Mean] = {}
        """Seconds of a decode, by sequences."""
        self._besides = Mean()
        """Seconds of a draft beyond its decodes: catching up, and forgetting what was guessed."""

    # --- what the trunk does -------------------------------------------------------------------------------

    def wants(self, sequence: Sequence, end: int) -> bool:
        """Whether rows up to position `end` will ever be read: not those far from a prompt's end."""
        return len(sequence.tokens) - end < self.window

    def collect(self, slot: int, start: int, rows: npt.NDArray[np.float32]) -> None:
        """The trunk has read the tokens at `start`, `start` + 1...: their hidden rows [n, n_embd], copied."""
        reading = self._readings.get(slot)
        if reading is None:
            reading = self._readings[slot] = Reading(self._buffer())
        reading.length = None
        if start > reading.end:
            self._forget_cache(slot, reading)
            reading.first = reading.end = start
        if start + len(rows) <= reading.end:
            return  # read again after a rejection
        self._append(reading, rows[reading.end - start :])
        if reading.fed and reading.first > reading.fed - 1:
            self._forget_cache(slot, reading)

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
        """`target` becomes what `source` is, but for unused rows further back than KEPT."""
        self.free(target)
        if (reading := self._readings.get(source)) is None:
            return
        end = reading.end if reading.length is None else min(reading.end, reading.length)
        fed = min(reading.fed, end)
        first = max(min(reading.first, end), end - KEPT)
        if fed and first > fed - 1:
            fed = 0
        rows = reading.buffer[first - reading.first : end - reading.first].copy()
        self._readings[target] = Reading(rows, fed, first, end, reading.oldest)
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

    def restore(self, sequence_id: int, saved: object | None) -> None:
        """Put what was saved into an id; nothing of it where the head's cache has no room."""
        self.free(sequence_id)
        if not isinstance(saved, SavedReading):
            return
        if saved.cache is not None:
            try:
                self._context.restore(sequence_id, saved.cache)
            except LlamaError:  # it begins anew
                self._context.remove(sequence_id)
                return
        end = saved.first + len(saved.rows)
        self._readings[sequence_id] = Reading(saved.rows.copy(), saved.fed, saved.first, end, saved.oldest)

    def free(self, sequence_id: int) -> None:
        """Nothing is known of a sequence id any more. Idempotent."""
        if (reading := self._readings.pop(sequence_id, None)) is not None:
            if len(reading.buffer) == 2 * self.window and len(self._spare) < MOST:
                self._spare.append(reading.buffer)
            if reading.fed:
                self._context.remove(sequence_id)

    def forget(self, sequence: Sequence) -> None:
        """Nothing to do: what is known belongs to sequence ids."""

    def _buffer(self) -> npt.NDArray[np.float32]:
        if self._spare:
            return self._spare.pop()
        return np.empty((2 * self.window, self._context.beside.shape[1]), np.float32)

    def _append(self, reading: Reading, new: npt.NDArray[np.float32]) -> None:
        window, n, used = self.window, len(new), reading.end - reading.first
        if used + n > len(reading.buffer) < 2 * window:  # as it was copied
            buffer = self._buffer()
            buffer[: min(used, 2 * window)] = reading.rows[-2 * window :]
            reading.first, reading.buffer = max(reading.first, reading.end - 2 * window), buffer
            used = reading.end - reading.first
        buffer = reading.buffer
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

    # --- drafting ------------------------------------------------------------------------------------------

    def can_draft(self, request: DraftRequest) -> bool:
        """Whether the trunk's rows of all tokens but the newest are there."""
        reading = self._readings.get(request.slot)
        if reading is None or reading.end != len(request.sequence.tokens) - 1:
            return False
        return (reading.fed or reading.first + 1) <= reading.end

    def cost(self, n: int, depth: int) -> float:
        """A decode for each token, and what comes besides."""
        if not self._decodes:
            return 0.0
        decode = self._decodes.get(n) or next(iter(self._decodes.values()))
        return depth * decode.value + self._besides.value

    def propose(self, requests: ListLike[DraftRequest]) -> list[Draft]:
        """Draft greedily, all together, one token a decode. Each request must pass `can_draft`.

        Raises what llama.cpp did: NoMemorySlot where the head's cache is full, LlamaError, FloatingPointError
        where its logits are no use. Then those who asked begin anew, and the others from their hidden rows.
        """
        started = perf_counter()
        try:
            drafts, caught_up, decoding = self._draft(requests)
        except Exception:
            self._recover(requests)
            raise
        if caught_up <= FEW * len(requests):
            self._besides.add(max(0.0, perf_counter() - started - decoding))
        return drafts

    def measure(self) -> None:
        """Time decodes of 1 up to MOST sequences: of nothing, which takes as long as any."""
        context = self._context
        for n in range(1, min(self.most, self._slots) + 1):
            for position in range(4):
                started = perf_counter()
                context.tokens[:n], context.positions[:n] = 0, position
                context.sequences[:n], context.outputs[:n] = range(n), 1
                context.decode(n)
                context.best(range(n), range(n))
                context.beside[:n] = context.hidden(n)
                self._decodes.setdefault(n, Mean()).add(perf_counter() - started)
            context.clear()

    def _recover(self, requests: ListLike[DraftRequest]) -> None:
        """After a failure nothing that was fed is relied on."""
        busy = {request.slot for request in requests}
        for idle in self._readings.keys() - busy:  # they go on from the rows that they still have
            self._forget_cache(idle, self._readings[idle])
        for request in requests:
            self.free(request.slot)
            self._context.remove(request.slot)  # what was fed before it failed

    def _draft(self, requests: ListLike[DraftRequest]) -> tuple[list[Draft], int, float]:
        """The drafts, the tokens that the head caught up on, and about the seconds of its decodes."""
        n, slots = len(requests), [request.slot for request in requests]
        deepest = max(request.limit for request in requests)
        self._width = deepest + 1 if n == 1 and deepest < self._widest else 0
        drafts = [Draft(kind=self.name) for _ in requests]
        rows, caught_up = self._catch_up(requests)
        mean = self._decodes.setdefault(n, Mean())
        for depth in range(deepest):
            started = perf_counter()
            tokens, _ = self._context.best(slots, rows)
            for draft, token in zip(drafts, tokens, strict=True):
                draft.tokens.append(token)
            if depth + 1 == deepest:
                break
            rows = self._next(requests, rows, tokens, depth)
            if depth:
                mean.add(perf_counter() - started)
        if deepest > 1 or self._width:  # guesses' entries go: the trunk's rows make those that come true
            for request in requests:
                self._context.remove(request.slot, len(request.sequence.tokens))
        for request, draft in zip(requests, drafts, strict=True):
            del draft.tokens[request.limit :]
        return drafts, caught_up, deepest * mean.value

    def _catch_up(self, requests: ListLike[DraftRequest]) -> tuple[list[int], int]:
        """Feed what the head has not read: the batch indices of the newest tokens, and how many it was."""
        context = self._context
        feeds = []
        for request in requests:
            reading, tokens = self._readings[request.slot], request.sequence.tokens
            if not reading.fed:
                reading.oldest = reading.first + 1
            first = reading.fed or reading.first + 1
            hidden = reading.rows[first - 1 - reading.first :]
            feeds.append((request.slot, first, tokens[first:], hidden))
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
        for request in requests:  # the last row stays, in case the newest token is taken back
            reading = self._readings[request.slot]
            reading.buffer[0] = reading.rows[-1]
            reading.fed, reading.first = len(request.sequence.tokens), reading.end - 1
            if reading.fed - reading.oldest > self._span:
                context.remove(request.slot, reading.oldest, reading.fed - self._span // 2)
                reading.oldest = reading.fed - self._span // 2
        return rows, total

    def _next(
        self, requests: ListLike[DraftRequest], rows: list[int], tokens: list[int], depth: int
    ) -> list[int]:
        """Feed the tokens just drafted, each beside the head's own hidden row of the one before."""
        context, n = self._context, len(requests)
        if self._width:  # every row is an output; what follows the one that counts makes room
            context.beside[:1] = context.hidden(self._width)[rows]
            [request] = requests
            context.remove(request.slot, len(request.sequence.tokens) + depth)
        else:
            context.beside[:n] = context.hidden(n)
        for index, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            context.tokens[index] = token
            context.positions[index] = len(request.sequence.tokens) + depth
            context.sequences[index] = request.slot
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
