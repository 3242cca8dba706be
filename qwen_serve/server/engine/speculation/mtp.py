"""Drafts from the checkpoint's own multi-token-prediction (MTP) head."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from .base import Draft
from .hidden import DraftCacheState, HiddenDrafter
from .times import Mean

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as ListLike

    import numpy.typing as npt

    from qwen_serve.llamacpp.mtp import MtpContext
    from qwen_serve.llamacpp.row_sampler import RowSampler

    from .base import DraftRequest

FEW = 24
"""Maximum tokens to catch up on for a sequence that drafts in every step."""

WIDEST = 5
"""Up to this many rows, all calls of a draft are padded to one width, and the padding is removed afterwards.
Calls of the same width reuse llama.cpp's graph; building a graph takes as long as ten rows."""

KEPT = 128
"""Maximum unused hidden rows that a copy of a sequence id keeps."""


def host_bytes(slots: int, checkpoints: int, window: int, n_embd: int) -> int:
    """Maximum bytes of hidden rows on the host. A piece stays whole while any of it is in the window."""
    return 4 * n_embd * ((slots + checkpoints) * KEPT + 2 * window)


class MtpDrafter(HiddenDrafter):
    """Feeds the head with the trunk's rows, and lets it guess the next tokens of a sequence that runs alone.

    The row of position p is fed together with the next token, and its entry is at position p + 1 of the
    head's cache. The last row is kept after it is fed, since a sequence that continues from a copy may have
    another token there.
    """

    name = "mtp"
    kinds: Mapping[str, float] = {"mtp": 0.7}
    most = 1
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

        The head sees at most the last `span` tokens of a sequence, and at least half of them. All calls of a
        draft have one width if that is at most `widest`, see WIDEST.
        """
        super().__init__(context, window, slots)
        self.depth, self._span, self._widest = depth, span, widest
        self._decode = Mean()
        """Seconds of a decode."""
        self._besides = Mean()
        """Seconds of a draft without its decodes: catching up, and removing guessed entries."""

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
        return depth * self._decode.value + self._besides.value

    def propose(self, requests: ListLike[DraftRequest]) -> list[Draft]:
        """Draft for the only request, one token a decode, with its own sampler and noise. It must pass
        `can_draft`.

        Raises NoMemorySlot if the head's cache is full, LlamaError, or FloatingPointError if its logits are
        unusable. Then the request's slot starts anew, and other ids continue from their hidden rows.
        """
        started, [request] = perf_counter(), requests
        try:
            tokens, caught_up = self._draft(request)
        except Exception:
            self._recover(request.slot)
            raise
        if caught_up <= FEW:
            decoding = len(tokens) * self._decode.value
            self._besides.add(max(0.0, perf_counter() - started - decoding))
        return [Draft(tokens, kind=self.name)]

    def measure(self) -> None:
        """Time decodes. The input is arbitrary, since it does not affect the time."""
        width = 2 if self._widest else 1
        hidden = np.zeros_like(self._context.input_hidden[:1])
        for turn in range(4):
            started = perf_counter()
            self._feed(0, turn * width, [0], hidden, width)
            self._context.best([0])
            hidden = self._context.hidden(1)
            self._decode.add(perf_counter() - started)
        self._context.clear()

    def _recover(self, slot: int) -> None:
        """After a failure, drop everything that was fed."""
        self.free(slot)
        self._context.remove(slot)  # entries fed before the failure
        for idle, state in self._states.items():  # they continue from the rows that they still have
            self._drop_entries(idle, state.start)

    def _draft(self, request: DraftRequest) -> tuple[list[int], int]:
        """The draft, and the number of tokens that the head caught up on."""
        context, slot, end = self._context, request.slot, len(request.sequence.tokens)
        width = request.limit + 1
        if width > min(self._widest, context.n_ubatch):
            width = 0  # as many rows as there are tokens
        row, caught_up = self._catch_up(request, width)
        tokens: list[int] = []
        sampler = request.sequence.sampler.noise
        for depth in range(request.limit):
            started = perf_counter()
            tokens += self._guess(row, sampler, tokens)
            if depth + 1 == request.limit:
                break
            hidden, row = context.hidden(1), 0
            if width:  # padding follows the row that is used
                context.remove(slot, end + depth)
            self._feed(slot, end + depth, tokens[-1:], hidden, width)
            if depth:
                self._decode.add(perf_counter() - started)
        if request.limit > 1 or width:  # remove guessed entries; accepted tokens get theirs from the trunk
            context.remove(slot, end)
        return tokens, caught_up

    def _guess(self, row: int, sampler: RowSampler | None, before: list[int]) -> list[int]:
        """The token that a request would choose from a row of the head, after the draft's tokens `before`."""
        if sampler is None:
            return self._context.best([row])
        for token in before:
            sampler.accept(token)
        try:
            return self._context.best([row], [sampler])
        finally:
            for token in reversed(before):
                sampler.take_back(token)

    def _catch_up(self, request: DraftRequest, width: int) -> tuple[int, int]:
        """Feed the rows that the head has not read; return the newest token's index, and the count."""
        context, slot, state = self._context, request.slot, self._states[request.slot]
        tokens, first = request.sequence.tokens[state.fed + 1 :], state.fed + 1
        hidden, total = state.between(state.fed, state.end), len(tokens)
        if total > (width or context.n_batch):  # all but the newest first, in calls as large as possible
            for start in range(0, total - 1, context.n_batch):
                end = min(start + context.n_batch, total - 1)
                self._feed(slot, first + start, tokens[start:end], hidden[start:end], output=False)
            tokens, hidden, first = tokens[-1:], hidden[-1:], first + total - 1
        self._feed(slot, first, tokens, hidden, width)
        state.start, state.fed, state.rows = state.end - 1, state.end, [hidden[-1:].copy()]
        if state.fed - state.first > self._span:
            kept = state.fed - self._span // 2
            context.remove(slot, state.first + 1, kept + 1)
            state.first = kept
        return len(tokens) - 1, total

    def _feed(
        self,
        slot: int,
        first: int,
        tokens: list[int],
        hidden: npt.NDArray[np.float32],
        width: int = 0,
        *,
        output: bool = True,
    ) -> None:
        """Decode tokens from position `first` on, each beside the hidden row of the one before. The last may
        be an output, and is repeated up to `width` rows, at the next positions."""
        context, n, end = self._context, len(tokens), max(len(tokens), width)
        context.tokens[:n] = np.maximum(tokens, 0)  # picture rows have no token
        context.tokens[n:end] = context.tokens[n - 1]
        context.positions[:end] = np.arange(first, first + end)
        context.sequences[:end] = slot
        context.input_hidden[:n] = hidden
        context.input_hidden[n:end] = hidden[-1]
        context.outputs[:end] = 0
        context.outputs[n - 1] = output
        context.decode(end)
