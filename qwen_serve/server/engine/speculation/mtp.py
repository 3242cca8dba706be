"""Drafts from the checkpoint's own multi-token-prediction (MTP) head."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from .base import Draft
from .hidden import DraftCacheState, HiddenDrafter
from .times import GroupMeans

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as ListLike

    import numpy.typing as npt

    from qwen_serve.llamacpp.mtp import MtpContext

    from .base import DraftRequest

FEW = 24
"""Maximum tokens of a sequence to catch up on, if it drafts in every step."""

WIDEST, STEP = 5, 8
"""Up to WIDEST rows a sequence, all calls of a draft are padded to one width, and the padding is removed
afterwards. Calls of the same width reuse llama.cpp's graph; building a graph takes as long as ten rows. For
several sequences the width is a multiple of STEP."""

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

        The head sees at most the last `span` tokens of a sequence, and at least half of them. All calls of a
        draft have one width if that is at most `widest` a sequence, see WIDEST.
        """
        super().__init__(context, window, slots)
        self.depth, self.most, self._span, self._widest = depth, most, span, widest
        self._decodes = GroupMeans()
        """Seconds of a decode, by number of sequences."""
        self._besides = GroupMeans()
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
        return depth * self._decodes.of(n) + self._besides.of(n)

    def propose(self, requests: ListLike[DraftRequest]) -> list[Draft]:
        """Draft for all requests together, each with its own sampler and noise. Each must pass `can_draft`.

        Raises NoMemorySlot if the head's cache is full, LlamaError, or FloatingPointError if its logits are
        unusable. Then the requests' slots start anew, and other ids continue from their hidden rows.
        """
        started, n = perf_counter(), len(requests)
        states = (self._states[request.slot] for request in requests)
        waiting = sum(state.end - state.fed for state in states)
        try:
            drafts = self._draft(requests)
        except Exception:
            self._recover(requests)
            raise
        if waiting <= FEW * n:
            decoding = max(map(len, drafts)) * self._decodes.of(n)
            self._besides.add(n, max(0.0, perf_counter() - started - decoding))
        return [Draft(tokens, kind=self.name) for tokens in drafts]

    def measure(self) -> None:
        """Time decodes for one sequence and for more. The input is arbitrary, since it does not affect the
        time."""
        n, hidden = 1, np.zeros_like(self._context.input_hidden[:1])
        while n <= min(self.most, self._context.n_ubatch):
            width = 2 if self._widest and n == 1 else 0
            for turn in range(4):
                started = perf_counter()
                parts = [Part(slot, turn, [0], hidden) for slot in range(n)]
                self._context.best(self._feed(parts, width))
                self._context.hidden(n)
                self._decodes.add(n, perf_counter() - started)
            self._context.clear()
            n *= 2

    def _recover(self, requests: ListLike[DraftRequest]) -> None:
        """After a failure, drop everything that was fed."""
        for request in requests:
            self.free(request.slot)
            self._context.remove(request.slot)  # entries fed before the failure
        for idle, state in self._states.items():  # they continue from the rows that they still have
            self._drop_entries(idle, state.start)

    def _draft(self, requests: ListLike[DraftRequest]) -> list[list[int]]:
        context, longest = self._context, max(request.limit for request in requests)
        width, rows = self._catch_up(requests, longest)
        drafts: list[list[int]] = [[] for _ in requests]
        samplers = [request.sequence.sampler.noise for request in requests]
        ends = [len(request.sequence.tokens) for request in requests]
        try:
            for depth in range(longest):
                started = perf_counter()
                guesses = context.best(rows, samplers) if any(samplers) else context.best(rows)
                for draft, sampler, guess in zip(drafts, samplers, guesses, strict=True):
                    draft.append(guess)
                    if sampler is not None:
                        sampler.accept(guess)
                if depth + 1 == longest:
                    break
                # those with shorter drafts go on, too: another number of rows is another graph
                hidden = context.hidden(len(requests))
                parts = [
                    Part(request.slot, end + depth, draft[-1:], hidden[i : i + 1])
                    for i, (request, end, draft) in enumerate(zip(requests, ends, drafts, strict=True))
                ]
                rows = self._feed(parts, width)
                if depth:
                    self._decodes.add(len(requests), perf_counter() - started)
        finally:
            for draft, sampler in zip(drafts, samplers, strict=True):
                for token in reversed(draft):
                    if sampler is not None:
                        sampler.take_back(token)
        if longest > 1:  # remove guessed entries; accepted tokens get theirs from the trunk
            for request, end in zip(requests, ends, strict=True):
                context.remove(request.slot, end)
        return [draft[: request.limit] for draft, request in zip(drafts, requests, strict=True)]

    def _catch_up(self, requests: ListLike[DraftRequest], longest: int) -> tuple[int, list[int]]:
        """Feed the rows that the head has not read. Return the width of all further calls, 0 for as many rows
        as are needed, and the index of each sequence's newest row."""
        context, n, parts = self._context, len(requests), []
        for request in requests:
            state = self._states[request.slot]
            tokens = request.sequence.tokens[state.fed + 1 :]
            parts.append(Part(request.slot, state.fed + 1, tokens, state.between(state.fed, state.end)))
        total, most = sum(len(part.tokens) for part in parts), min(context.n_batch, context.n_ubatch)
        width = longest + 1 if n == 1 else -(-total // STEP) * STEP
        if width > min(self._widest * n, most):
            width = 0
        if total > (width or most):
            self._feed_all([part.cut(0, len(part.tokens) - 1) for part in parts])
            parts = [part.cut(len(part.tokens) - 1, len(part.tokens)) for part in parts]
        rows = self._feed(parts, width)
        for part in parts:
            state = self._states[part.slot]
            state.start, state.fed, state.rows = state.end - 1, state.end, [part.hidden[-1:].copy()]
            if state.fed - state.first > self._span:
                kept = state.fed - self._span // 2
                context.remove(part.slot, state.first + 1, kept + 1)
                state.first = kept
        return width, rows

    def _feed_all(self, parts: ListLike[Part]) -> None:
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

    def _feed(self, parts: ListLike[Part], width: int = 0, *, output: bool = True) -> list[int]:
        """Decode parts of sequences; return the index of the last row of each, which may be an output. The
        last one is repeated up to `width` rows, whose entries are removed."""
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
        context.decode(end)
        if end > n:
            context.remove(parts[-1].slot, behind)
        return last
