"""Drafts from the checkpoint's own multi-token-prediction (MTP) head."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from .base import Draft
from .hidden import DraftCacheState, HiddenDrafter
from .times import Mean, group_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as ListLike

    import numpy.typing as npt

    from qwen_serve.llamacpp.mtp import MtpContext

    from .base import DraftRequest

FEW = 24
"""Maximum tokens to catch up on for a single sequence that drafts in every step; for one of several it is
WIDEST."""

WIDEST = 5
"""If a sequence has at most this many rows, all calls of a draft are padded to one width, and the padding is
removed afterwards. Calls of the same width reuse llama.cpp's graph; building a graph takes as long as ten
rows."""

KEPT = 128
"""Maximum unused hidden rows that a copy of a sequence id keeps."""


def host_bytes(slots: int, checkpoints: int, window: int, n_embd: int) -> int:
    """Maximum bytes of hidden rows on the host. A piece stays whole while any of it is in the window, and
    sequences that run together share pieces."""
    return 4 * n_embd * ((slots + checkpoints) * KEPT + 2 * window)


Feed: TypeAlias = "tuple[int, int, list[int], npt.NDArray[np.float32]]"
"""Rows for the head: slot, first position, tokens, and the trunk's row before each."""


class MtpDrafter(HiddenDrafter):
    """Feeds the head with the trunk's rows, and lets it guess the next tokens.

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
        most: int = 1,
        span: int = 2**31,
        widest: int = 0,
    ) -> None:
        """Drafts of at most `depth` tokens, for at most `most` sequences at once. Sequence ids below `slots`
        run; the others hold copies.

        The head sees at most the last `span` tokens of a sequence, and at least half of them. All calls of a
        draft have one width if that is at most `widest`, see WIDEST.
        """
        super().__init__(context, window, slots)
        self.depth, self.most, self._span, self._widest = depth, most, span, widest
        self._width = 0
        """Rows of each sequence in each call of the current draft; 0: as many as there are tokens."""
        self._decodes: dict[int, Mean] = {}
        """Seconds of a decode, by group of sequences."""
        self._besides: dict[int, Mean] = {}
        """Seconds of a draft without its decodes, by group of sequences: catching up, and removing guessed
        entries."""

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

    def cost(self, n: int, depth: int) -> float:
        """Seconds of a decode for each token, and of the rest of a draft."""
        return depth * _nearest(self._decodes, n) + _nearest(self._besides, n)

    def propose(self, requests: ListLike[DraftRequest]) -> list[Draft]:
        """Draft greedily for all requests together, one token a decode. Each must pass `can_draft`.

        Raises NoMemorySlot if the head's cache is full, LlamaError, or FloatingPointError if its logits are
        unusable. Then the requests' slots start anew, and other ids continue from their hidden rows.
        """
        started = perf_counter()
        try:
            drafts, caught_up, decoding = self._draft(requests)
        except Exception:
            self._recover(requests)
            raise
        if caught_up <= (FEW if len(requests) == 1 else WIDEST * len(requests)):
            besides = self._besides.setdefault(group_of(len(requests)), Mean())
            besides.add(max(0.0, perf_counter() - started - decoding))
        return drafts

    def measure(self) -> None:
        """Time decodes of 1, 2, 4... sequences. The input is arbitrary, since it does not affect the time."""
        context, width, n = self._context, 2 if self._widest else 1, 1
        while n <= min(self.most, self._slots):
            rows = n * width
            for turn in range(4):
                started = perf_counter()
                context.tokens[:rows], context.outputs[:rows] = 0, 0
                context.outputs[width - 1 : rows : width] = 1
                context.positions[:rows] = np.tile(np.arange(width) + turn * width, n)
                context.sequences[:rows] = np.repeat(np.arange(n), width)
                context.decode(rows)
                context.best(range(n), range(width - 1, rows, width))
                context.input_hidden[:rows] = np.repeat(context.hidden(n), width, axis=0)
                self._decodes.setdefault(n, Mean()).add(perf_counter() - started)
            context.clear()
            n *= 2

    def _recover(self, requests: ListLike[DraftRequest]) -> None:
        """After a failure, drop everything that was fed."""
        for request in requests:
            self.free(request.slot)
            self._context.remove(request.slot)  # entries fed before the failure
        for idle, state in self._states.items():  # they continue from the rows that they still have
            self._drop_entries(idle, state.start)

    def _draft(self, requests: ListLike[DraftRequest]) -> tuple[list[Draft], int, float]:
        """The drafts, the number of tokens that the head caught up on, and about how many seconds decodes
        took."""
        n, slots = len(requests), [request.slot for request in requests]
        deepest = max(request.limit for request in requests)
        even = deepest < self._widest and n * (deepest + 1) <= self._context.n_ubatch
        self._width = deepest + 1 if even else 0
        drafts = [Draft(kind=self.name) for _ in requests]
        rows, caught_up = self._catch_up(requests)
        mean = self._decodes.setdefault(group_of(n), Mean(_nearest(self._decodes, n)))
        for depth in range(deepest):
            started = perf_counter()
            tokens = self._context.best(slots, rows)
            for draft, token in zip(drafts, tokens, strict=True):
                draft.tokens.append(token)
            if depth + 1 == deepest:
                break
            rows = self._next(requests, tokens, depth)
            if depth:
                mean.add(perf_counter() - started)
        if deepest > 1 or self._width:  # remove guessed entries; accepted tokens get theirs from the trunk
            for request in requests:
                self._context.remove(request.slot, len(request.sequence.tokens))
        for request, draft in zip(requests, drafts, strict=True):
            del draft.tokens[request.limit :]
        return drafts, caught_up, deepest * mean.value

    def _catch_up(self, requests: ListLike[DraftRequest]) -> tuple[list[int], int]:
        """Feed the rows that the head has not read; return the newest tokens' indices, and the count."""
        context = self._context
        feeds = []
        for request in requests:
            state, tokens = self._states[request.slot], request.sequence.tokens
            hidden = state.between(state.fed, state.end)
            feeds.append((request.slot, state.fed + 1, tokens[state.fed + 1 :], hidden))
        total = sum(len(tokens) for _, _, tokens, _ in feeds)
        if self._width or total > context.n_batch:
            feeds = self._feed_ahead(feeds, self._width or 1)
        rows, n = [], 0
        for slot, first, tokens, hidden in feeds:
            self._put(n, slot, first, tokens, hidden)
            rows.append(n + len(tokens) - 1)
            n = self._pad(rows[-1] + 1, n + self._width)
        context.decode(n)
        for slot, _, _, hidden in feeds:
            state = self._states[slot]
            state.start, state.fed, state.rows = state.end - 1, state.end, [hidden[-1:].copy()]
            if state.fed - state.first > self._span:
                first = state.fed - self._span // 2
                context.remove(slot, state.first + 1, first + 1)
                state.first = first
        return rows, total

    def _feed_ahead(self, feeds: ListLike[Feed], most: int) -> list[Feed]:
        """Feed all but the newest row of each sequence that has more than `most` rows, in calls as large as
        possible; return what is left of each."""
        context, n, left = self._context, 0, []
        for slot, first, tokens, hidden in feeds:
            start, end = 0, len(tokens) - 1 if len(tokens) > most else 0
            while start < end:
                stop = min(end, start + context.n_batch - n)
                self._put(n, slot, first + start, tokens[start:stop], hidden[start:stop])
                n, start = n + stop - start, stop
                if n == context.n_batch:
                    n = self._feed(n)
            left.append((slot, first + end, tokens[end:], hidden[end:]))
        self._feed(n)
        return left

    def _feed(self, n: int) -> int:
        """Decode the first `n` rows without outputs; return 0, the rows that are left."""
        if n:
            self._context.outputs[:n] = 0
            self._context.decode(n)
        return 0

    def _next(self, requests: ListLike[DraftRequest], tokens: list[int], depth: int) -> list[int]:
        """Feed the tokens just drafted, each with the head's own hidden row of the token before."""
        context, hidden = self._context, self._context.hidden(len(requests))
        rows, n = [], 0
        for index, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            position = len(request.sequence.tokens) + depth
            if self._width:  # padding follows the row that is used
                context.remove(request.slot, position)
            self._put(n, request.slot, position, [token], hidden[index : index + 1])
            rows.append(n)
            n = self._pad(n + 1, n + self._width)
        context.decode(n)
        return rows

    def _pad(self, start: int, end: int) -> int:
        """Repeat the row before `start` up to `end`, at the next positions; return the end."""
        context, last = self._context, start - 1
        if start >= end:
            return start
        for column in (context.tokens, context.sequences, context.input_hidden):
            column[start:end] = column[last]
        context.positions[start:end] = context.positions[last] + np.arange(1, end - last)
        context.outputs[start:end] = 0
        return end

    def _put(
        self, at: int, slot: int, first: int, tokens: list[int], hidden: npt.NDArray[np.float32]
    ) -> None:
        """Write rows from `at` on; the last is an output."""
        context, end = self._context, at + len(tokens)
        context.tokens[at:end] = np.maximum(tokens, 0)  # picture rows have no token
        context.positions[at:end] = np.arange(first, first + len(tokens))
        context.sequences[at:end] = slot
        context.input_hidden[at:end] = hidden
        context.outputs[at:end] = 0
        context.outputs[end - 1] = 1


def _nearest(times: Mapping[int, Mean], n: int) -> float:
    """The time for the number of sequences that is nearest to `n`; 0 if none is known."""
    return times[min(times, key=lambda known: abs(known - n))].value if times else 0.0
