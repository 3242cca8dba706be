"""Drafts from the checkpoint's own multi-token-prediction (MTP) head."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from qwen_serve.server.engine.planning.sequence_ids import MTP_SEQUENCES

from .base import Draft
from .hidden import DraftCacheState, HiddenDrafter
from .times import Mean

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as ListLike

    import numpy.typing as npt

    from qwen_serve.llamacpp.mtp import MtpContext

    from .base import DraftRequest

FEW = 24
"""Maximum tokens to catch up on for a sequence that drafts in every step."""

WIDEST = 5
"""Up to this many rows, all calls of a draft for a lone sequence are padded to one width; the padding is
removed afterwards. Calls of one width reuse llama.cpp's graph, and building one takes as long as ten rows
do."""

KEPT = 128
"""Unused hidden rows that a copy of a sequence id keeps at most."""


def host_bytes(slots: int, checkpoints: int, window: int, n_embd: int) -> int:
    """Maximum bytes of hidden rows on the host. A piece is kept whole while any row of it is in the
    window."""
    return 4 * n_embd * ((slots + checkpoints) * KEPT + MTP_SEQUENCES * 2 * window)


class MtpDrafter(HiddenDrafter):
    """Feeds the head with the trunk's rows, and has it guess the next tokens.

    The row of position p is fed together with the next token, and its entry is at position p + 1 of the
    head's cache. The last row is kept after it is fed: a sequence that continues from a copy may have another
    token there.
    """

    name = "mtp"
    kinds: Mapping[str, float] = {"mtp": 0.7}
    most = MTP_SEQUENCES
    _context: MtpContext

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

        The head sees at most the last `span` tokens of a sequence, and at least half of them. All calls for a
        lone sequence have one width if that is at most `widest`, see WIDEST.
        """
        super().__init__(context, window, slots)
        self.depth, self._span, self._widest = depth, span, widest
        self._width = 0
        """Rows of each call of the current draft; 0: as many as there are tokens."""
        self._decodes: dict[int, Mean] = {}
        """Seconds of a decode, by number of sequences."""
        self._besides = Mean()
        """Seconds of a draft beyond its decodes: catching up, and removing guessed entries."""

    def copy(self, source: int, target: int) -> None:
        """Copy the state of `source` to `target`, without unused rows further back than KEPT."""
        self.free(target)
        if (state := self._states.get(source)) is None or (end := state.known) <= state.start:
            return
        start = max(state.start, end - KEPT)
        fed = min(state.fed, end - 1)
        rows = [state.between(start, end)]
        if state.first < fed and start <= fed:
            self._context.copy(source, target)
            if fed < state.fed:
                self._context.remove(target, fed + 1)
            self._states[target] = DraftCacheState(state.first, fed, start, end, rows)
        else:
            self._states[target] = DraftCacheState(start, start, start, end, rows)

    # --- drafting ------------------------------------------------------------------------------------------

    def can_draft(self, request: DraftRequest) -> bool:
        """Whether the rows of all tokens but the newest were collected, and the last is not used yet."""
        if not super().can_draft(request):
            return False
        state = self._states[request.slot]
        return state.fed < state.end

    def cost(self, n: int, depth: int) -> float:
        """Seconds of a decode for each token, and of the rest of a draft."""
        if not self._decodes:
            return 0.0
        decode = self._decodes.get(n) or next(iter(self._decodes.values()))
        return depth * decode.value + self._besides.value

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
        if caught_up <= FEW * len(requests):
            self._besides.add(max(0.0, perf_counter() - started - decoding))
        return drafts

    def measure(self) -> None:
        """Time decodes of 1 up to MTP_SEQUENCES sequences with made-up input, which takes as long as any."""
        context = self._context
        for n in range(1, min(self.most, self._slots) + 1):
            for position in range(4):
                started = perf_counter()
                context.tokens[:n], context.positions[:n] = 0, position
                context.sequences[:n], context.outputs[:n] = range(n), 1
                context.decode(n)
                context.best(range(n), range(n))
                context.input_hidden[:n] = context.hidden(n)
                self._decodes.setdefault(n, Mean()).add(perf_counter() - started)
            context.clear()

    def _recover(self, requests: ListLike[DraftRequest]) -> None:
        """After a failure, drop everything that was fed."""
        for request in requests:
            self.free(request.slot)
            self._context.remove(request.slot)  # entries fed before the failure
        for idle, state in self._states.items():  # these continue from the rows that they still have
            self._drop_entries(idle, state.start)

    def _draft(self, requests: ListLike[DraftRequest]) -> tuple[list[Draft], int, float]:
        """The drafts, the number of tokens that the head caught up on, and roughly its decodes' seconds."""
        n, slots = len(requests), [request.slot for request in requests]
        deepest = max(request.limit for request in requests)
        self._width = deepest + 1 if n == 1 and deepest < self._widest else 0
        drafts = [Draft(kind=self.name) for _ in requests]
        rows, caught_up = self._catch_up(requests)
        mean = self._decodes.setdefault(n, Mean())
        for depth in range(deepest):
            started = perf_counter()
            tokens = self._context.best(slots, rows)
            for draft, token in zip(drafts, tokens, strict=True):
                draft.tokens.append(token)
            if depth + 1 == deepest:
                break
            rows = self._next(requests, rows, tokens, depth)
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
        for slot, _, _, hidden in feeds:
            state = self._states[slot]
            state.start, state.fed, state.rows = state.end - 1, state.end, [hidden[-1:].copy()]
            if state.fed - state.first > self._span:
                first = state.fed - self._span // 2
                context.remove(slot, state.first + 1, first + 1)
                state.first = first
        return rows, total

    def _next(
        self, requests: ListLike[DraftRequest], rows: list[int], tokens: list[int], depth: int
    ) -> list[int]:
        """Feed the tokens just drafted, each with the head's own hidden row of the token before."""
        context, n = self._context, len(requests)
        if self._width:  # every row is an output; the padding after the row that counts is removed
            context.input_hidden[:1] = context.hidden(self._width)[rows]
            [request] = requests
            context.remove(request.slot, len(request.sequence.tokens) + depth)
        else:
            context.input_hidden[:n] = context.hidden(n)
        for index, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            context.tokens[index] = token
            context.positions[index] = len(request.sequence.tokens) + depth
            context.sequences[index] = request.slot
        context.outputs[:n] = 1
        self._decode(n)
        return list(range(n))

    def _decode(self, n: int) -> None:
        """Decode the first `n` tokens. With a width they are padded to it, and all rows are outputs."""
        context, width = self._context, self._width
        if n > width:  # the first draft after a prompt
            self._width = 0
        elif width:
            context.tokens[n:width], context.sequences[n:width] = context.tokens[n - 1], context.sequences[0]
            context.positions[n:width] = context.positions[n - 1] + np.arange(1, width - n + 1)
            context.input_hidden[n:width] = context.input_hidden[n - 1]
            context.outputs[:width] = 1
        context.decode(max(n, width))

    def _put(
        self, at: int, slot: int, first: int, tokens: list[int], hidden: npt.NDArray[np.float32]
    ) -> None:
        context, end = self._context, at + len(tokens)
        context.tokens[at:end] = np.maximum(tokens, 0)  # picture rows have no token
        context.positions[at:end] = np.arange(first, first + len(tokens))
        context.sequences[at:end] = slot
        context.input_hidden[at:end] = hidden
