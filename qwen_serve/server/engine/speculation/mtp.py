"""Drafts from the checkpoint's own multi-token-prediction (MTP) head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import numpy.typing as npt

from qwen_serve.llamacpp.mtp import MtpContext
from qwen_serve.llamacpp.row_sampler import RowSampler
from qwen_serve.llamacpp.row_steps import MOST_QUEUED

from .base import DraftRequest, Guesses
from .hidden import DraftCacheState, HiddenDrafter

FEW = 24
"""Maximum tokens of a sequence to catch up on, if it drafts in every step."""

WIDEST = 5
"""A sequence's rows up to which the first pass of a draft is padded, so that it is of one shape: building
a graph takes as long as ten rows."""

KEPT = 128
"""Maximum unused hidden rows that a copy of a sequence id keeps."""


def host_bytes(slots: int, checkpoints: int, window: int, n_embd: int) -> int:
    """Maximum bytes of hidden rows on the host. A piece stays whole while any of it is in the window."""
    return 4 * n_embd * ((slots + checkpoints) * KEPT + 2 * window)


@dataclass(slots=True)
class Part:
    """Tokens of a sequence from position `first` on, each beside the hidden row of the one before."""

    slot: int
    first: int
    tokens: list[int]
    hidden: npt.NDArray[np.float32]

    def cut(self, start: int, end: int) -> Part:
        """The tokens from `start` up to `end` - 1 of it."""
        return Part(self.slot, self.first + start, self.tokens[start:end], self.hidden[start:end])


class MtpDrafter(HiddenDrafter):
    """Feeds the head with the trunk's rows, and lets it guess the next tokens. A pass of the head gives one
    token of every draft.

    The row of position p is fed together with the next token, and its entry is at position p + 1 of the
    head's cache. The last row is kept after it is fed, since a sequence that continues from a copy may have
    another token there.
    """

    name = "mtp"
    kinds: Mapping[str, float] = {"mtp": 0.7}
    _context: MtpContext

    def __init__(
        self,
        context: MtpContext,
        window: int,
        *,
        depth: int,
        slots: int,
        most: int,
        span: int = 2**31,
        widest: int = 0,
    ) -> None:
        """Drafts of at most `depth` tokens for `most` sequences at once. Sequence ids below `slots` run; the
        others hold copies.

        The head sees at most the last `span` tokens of a sequence, and at least half of them. The first pass
        of a draft is padded to up to `widest` rows a sequence, see WIDEST.
        """
        super().__init__(context, window, slots)
        self.depth, self.most, self._span, self._widest = depth, most, span, widest

    def copy(self, source: int, target: int) -> None:
        """Copy the state of `source` to `target`, without unused rows further back than KEPT."""
        self.free(target)
        if (state := self._states.get(source)) is None or (end := state.known) <= state.start:
            return
        start = max(state.start, end - KEPT)
        fed = min(state.fed, end - 1)
        rows = [state.between(start, end).copy()]
        if state.first < fed and start <= fed:
            self._context.copy(source, target)
            if fed < state.fed:
                self._context.remove(target, fed + 1)
            self._states[target] = DraftCacheState(state.first, fed, start, end, rows)
        else:
            self._states[target] = DraftCacheState(start, start, start, end, rows)

    # --- drafting ------------------------------------------------------------------------------------------

    def can_draft(self, request: DraftRequest) -> bool:
        """Whether the rows of all tokens but the newest were collected, and the last of them is not used
        yet."""
        if not super().can_draft(request):
            return False
        state = self._states[request.slot]
        return state.fed < state.end

    def begin(self, requests: Sequence[DraftRequest]) -> Guesses:
        """Draft for all requests together. After an error other ids continue from their hidden rows."""
        states = (self._states[request.slot] for request in requests)
        self._typical = sum(state.end - state.fed for state in states) <= FEW * len(requests)
        try:
            return self._begin(requests)
        except Exception:
            self._recover(requests)
            raise

    def measure(self) -> None:
        """Time drafts of one token and of several, for one sequence and for more. The input is arbitrary,
        since it does not affect the time."""
        n, hidden = 1, np.zeros_like(self._context.input_hidden[:1])
        while n <= min(self.most, self._context.n_ubatch):
            depths = sorted({1, min(self.depth, 4)})
            for _ in range(4):
                spent = []
                for depth in depths:
                    started = perf_counter()
                    self._run([Part(slot, 0, [0], hidden) for slot in range(n)], [None] * n, depth).read()
                    self._context.clear()
                    spent.append(perf_counter() - started)
                self._first.add(n, spent[0])
                if len(depths) > 1:
                    self._further.add(n, max(0.0, spent[-1] - spent[0]) / (depths[-1] - 1))
            n *= 2

    def _recover(self, requests: Sequence[DraftRequest]) -> None:
        """After a failure, drop everything that was fed."""
        for request in requests:
            self.free(request.slot)
            self._context.remove(request.slot)  # entries fed before the failure
        for idle, state in self._states.items():  # they continue from the rows that they still have
            self._drop_entries(idle, state.start)

    def _begin(self, requests: Sequence[DraftRequest]) -> Guesses:
        context = self._context
        longest = min(max(request.limit for request in requests), MOST_QUEUED // len(requests))
        parts = self._unread(requests, longest)
        samplers = [request.sequence.sampler.noise for request in requests]
        guesses = self._run(parts, samplers, longest)
        for part in parts:
            state = self._states[part.slot]
            state.start, state.fed, state.rows = state.end - 1, state.end, [part.hidden[-1:].copy()]
            if state.fed - state.first > self._span:
                kept = state.fed - self._span // 2
                context.remove(part.slot, state.first + 1, kept + 1)
                state.first = kept
        return Guesses(
            lambda: [draft[: one.limit] for draft, one in zip(guesses.read(), requests, strict=True)],
            guesses.context,
            guesses.rows,
        )

    def _unread(self, requests: Sequence[DraftRequest], longest: int) -> list[Part]:
        """The rows that the head has not read, except those that are too many for the first pass of a draft:
        they are fed now."""
        parts, most = [], min(self._context.n_batch, self._context.n_ubatch)
        for request in requests:
            state = self._states[request.slot]
            tokens = request.sequence.tokens[state.fed + 1 :]
            parts.append(Part(request.slot, state.fed + 1, tokens, state.between(state.fed, state.end)))
        total = sum(len(part.tokens) for part in parts)
        if total > (self._width(len(parts), longest) or most):
            self._feed_all([part.cut(0, len(part.tokens) - 1) for part in parts])
            parts = [part.cut(len(part.tokens) - 1, len(part.tokens)) for part in parts]
        return parts

    def _width(self, n: int, longest: int) -> int:
        """Rows of a draft's first pass, as many as a verification may add; 0 if it is not padded."""
        fits = (longest + 1) * n <= min(self._context.n_batch, self._context.n_ubatch)
        return (longest + 1) * n if fits and longest < self._widest else 0

    def _run(self, parts: Sequence[Part], samplers: Sequence[RowSampler | None], longest: int) -> Guesses:
        """Draft `longest` tokens behind each part, for all as many: another number of rows is another graph.
        Entries of guesses are removed: accepted tokens get theirs from the trunk."""
        context, n, queued = self._context, len(parts), self._context.queues

        def choose(last: list[int]) -> None:
            """Have tokens chosen from these rows of the next pass, and from all rows of those behind it."""
            behind = range(context.n_batch, context.n_batch * longest, context.n_batch)
            indices = [index for i, row in enumerate(last) for index in (row, *(at + i for at in behind))]
            context.choose(indices, [one for one in samplers for _ in range(longest)], now=False)

        rows = self._feed(parts, self._width(n, longest), before=choose if queued else None)
        context.positions[:n] = ends = [part.first + len(part.tokens) for part in parts]
        context.sequences[:n] = slots = [part.slot for part in parts]
        context.outputs[:n] = 1
        drafts: list[list[int]] = [[] for _ in parts]
        try:
            for depth in range(longest):
                if not queued:
                    guesses = context.best(rows, samplers)
                    for draft, sampler, guess in zip(drafts, samplers, guesses, strict=True):
                        draft.append(guess)
                        if sampler is not None:
                            sampler.accept(guess)
                if depth + 1 == longest:
                    break
                if queued:
                    chosen = np.arange(depth * n, (depth + 1) * n, dtype=np.int32)
                    context.decode_next(chosen, np.array(rows, np.int32))
                else:
                    context.tokens[:n] = guesses
                    context.input_hidden[:n] = context.hidden(rows[-1] + 1)[rows]
                    context.decode(n)
                rows = list(range(n))
                context.positions[:n] += 1
        finally:
            for draft, sampler in zip(drafts, samplers, strict=True):
                for token in reversed(draft):
                    if sampler is not None:
                        sampler.take_back(token)
        if longest > 1:
            for slot, end in zip(slots, ends, strict=True):
                context.remove(slot, end)
        if not queued:
            return Guesses(lambda: drafts)

        def read() -> list[list[int]]:
            tokens = np.maximum(context.chosen(), 0).reshape(n, longest)  # an unusable row's is 0 there, too
            return [[int(token) for token in draft] for draft in tokens]

        places = np.arange(MOST_QUEUED, MOST_QUEUED + n * longest).reshape(n, longest)
        return Guesses(read, context, places.tolist())

    def _feed_all(self, parts: Sequence[Part]) -> None:
        """Decode parts without outputs, in calls as large as possible."""
        call: list[Part] = []
        room = self._context.n_batch
        for part in parts:
            at, end = 0, len(part.tokens)
            while at < end:
                call.append(piece := part.cut(at, min(end, at + room)))
                at += len(piece.tokens)
                room -= len(piece.tokens)
                if not room:
                    self._feed(call, output=False)
                    call, room = [], self._context.n_batch
        if call:
            self._feed(call, output=False)

    def _feed(
        self,
        parts: Sequence[Part],
        width: int = 0,
        *,
        output: bool = True,
        before: Callable[[list[int]], None] | None = None,
    ) -> list[int]:
        """Decode parts of sequences; return the index of the last row of each, which may be an output. The
        last one is repeated up to `width` rows, whose entries are removed. `before` is called with the
        indices before the pass begins."""
        context, n, last = self._context, 0, []
        for part in parts:
            end = n + len(part.tokens)
            context.tokens[n:end] = np.maximum(part.tokens, 0)  # picture rows have no token
            context.positions[n:end] = np.arange(part.first, part.first + end - n)
            context.sequences[n:end] = part.slot
            context.input_hidden[n:end] = part.hidden
            last.append(end - 1)
            n = end
        if (end := max(n, width)) > n:
            behind = int(context.positions[n - 1]) + 1
            context.tokens[n:end] = context.tokens[n - 1]
            context.positions[n:end] = np.arange(behind, behind + end - n)
            context.sequences[n:end] = parts[-1].slot
            context.input_hidden[n:end] = context.input_hidden[n - 1]
        context.outputs[:end] = 0
        context.outputs[last] = output
        if before is not None:
            before(last)
        context.decode(end)
        if end > n:
            context.remove(parts[-1].slot, behind)
        return last
