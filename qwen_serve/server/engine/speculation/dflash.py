"""Drafts from a block drafter (DFlash): one pass for all tokens of the drafts of all sequences."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter

import numpy as np

from qwen_serve.llamacpp.draft import DraftContext
from qwen_serve.llamacpp.errors import NoMemorySlot
from qwen_serve.llamacpp.row_sampler import RowSampler
from qwen_serve.llamacpp.row_steps import MOST_QUEUED
from qwen_serve.server.engine.planning.spec import DraftSpec

from .base import DraftRequest, Guesses
from .hidden import DraftCacheState, HiddenDrafter

FEW = 32
"""Maximum rows to inject for a sequence that drafts in every step; a longer injection happens only once."""

KEPT = 512
"""Maximum positions of the drafter's cache that a copy of a sequence id shares."""

RUNNING = 2
"""A sequence's entries may fill this many windows before they are cut back to one."""


def cells(window: int, slots: int, checkpoints: int, most: int, block: int) -> int:
    """Cells of the drafter's cache: for slots, for checkpoints, and for the blocks that are being guessed."""
    return slots * (RUNNING + 1) * window + checkpoints * min(KEPT, window) + most * block


def host_bytes(slots: int, window: int, n_features: int) -> int:
    """Maximum bytes of waiting rows on the host, without a ring. A piece that is partly in the window stays
    whole."""
    return 4 * slots * 2 * window * n_features


class DflashDrafter(HiddenDrafter):
    """Injects the trunk's rows into the drafter's cache, and lets the drafter fill a block of mask tokens.

    The rows of the trunk's layers wait in a ring on the device, or on the host if this llama.cpp has no ring,
    until the sequence drafts or its state is shared. Then they are injected, each at its token's position.
    With a ring, the call that computes the block also injects the newest rows. The drafter sees at least the
    last `window` tokens and at most twice as many.
    """

    name = "dflash"
    reads_pictures = False  # the ring keeps rows by position, and rows of a picture share positions
    kinds: Mapping[str, float] = {"dflash": 0.85}
    _context: DraftContext

    def __init__(self, context: DraftContext, spec: DraftSpec, window: int, *, slots: int, most: int) -> None:
        """Drafts for `most` sequences at once. Sequence ids below `slots` run; the others hold copies."""
        super().__init__(context, window, slots)
        self.layers, self.depth, self.most = spec.layers, spec.block - 1, most
        self._block, self._mask = spec.block, spec.mask

    def copy(self, source: int, target: int) -> None:
        """Let `target` share the newest entries of `source`, at most KEPT."""
        self.free(target)
        if (state := self._states.get(source)) is None:
            return
        end = state.known
        first = max(state.first, end - min(KEPT, self.window))
        if first >= end:
            return
        if state.fed < end:
            try:
                self._inject([source])
            except Exception:
                self.free(source)
                raise
        self._context.copy(source, target, first, end)
        self._states[target] = DraftCacheState(first, end, end, end, fresh=end)

    # --- drafting ------------------------------------------------------------------------------------------

    def begin(self, requests: Sequence[DraftRequest]) -> Guesses:
        """Fill a block for each request, all in one pass. After an error every sequence starts anew."""
        slots = [request.slot for request in requests]
        waiting = sum(self._states[slot].end - self._states[slot].fed for slot in slots)
        self._typical = waiting <= FEW * len(slots)
        together = all(map(self._goes_with_a_block, slots))
        try:
            if not together:
                self._inject(slots)
            return self._fill(requests, together=together)
        except Exception:
            self._states.clear()
            self._context.clear()
            raise

    def measure(self) -> None:
        """Time blocks for one sequence and for more. The input is arbitrary, since it does not affect the
        time."""
        n = 1
        while n <= min(self.most, self._slots):
            for _ in range(4 if n == 1 else 2):
                started = perf_counter()
                together = self._context.source is not None
                wanted = [(slot, self._block, 0, 0) for slot in range(n)]
                self._put_blocks(wanted, [None] * n, together=together).read()
                self._first.add(n, perf_counter() - started)
                self._context.clear()
            n *= 2

    def _goes_with_a_block(self, slot: int) -> bool:
        """Whether the call that guesses can inject the newest rows, as many as a block has. Then that call
        always has the same shape and graph. Some of these rows may have been injected before."""
        state = self._states[slot]
        first = state.end - self._block
        return self._context.source is not None and max(state.first, state.fresh) <= first <= state.fed

    def _fill(self, requests: Sequence[DraftRequest], *, together: bool) -> Guesses:
        starts = [len(request.sequence.tokens) - 1 for request in requests]
        if together:
            for request, start in zip(requests, starts, strict=True):
                state = self._states[request.slot]
                if state.fed > start - self._block:
                    self._context.remove(request.slot, start - self._block, state.fed)
                state.rows.clear()
                state.fed = state.start = state.end
        wanted = [
            (r.slot, start, r.sequence.tokens[-1], r.sequence.pictures.position(start) - start)
            for r, start in zip(requests, starts, strict=True)
        ]
        samplers = [request.sequence.sampler.noise for request in requests]
        guesses = self._put_blocks(wanted, samplers, together=together)
        self._trim(request.slot for request in requests)
        for request, start in zip(requests, starts, strict=True):
            self._context.remove(request.slot, start)
        return Guesses(
            lambda: [draft[: one.limit] for draft, one in zip(guesses.read(), requests, strict=True)],
            guesses.context,
            guesses.rows,
        )

    def _put_blocks(
        self,
        wanted: Sequence[tuple[int, int, int, int]],
        samplers: Sequence[RowSampler | None],
        *,
        together: bool,
    ) -> Guesses:
        """Guess `depth` tokens after each `newest` token, the sequence's token `start`: (slot, start, newest,
        shift). The trunk has it at the position `start` + `shift`, which is less behind pictures. They are
        chosen by the sequences' `samplers`, which do not count the tokens before in the same block.

        With `together` the same call injects the rows of as many tokens before it as a block has.
        """
        context, block = self._context, self._block
        n = len(wanted) * block
        before = n if together else 0
        context.tokens[before : before + n] = self._mask
        context.outputs[before : before + n] = 1  # all rows of blocks, or the graph would read wrong ones
        shifts = np.zeros(before, np.int32)
        for number, (slot, start, newest, shift) in enumerate(wanted):
            at = before + number * block
            context.tokens[at] = newest
            context.positions[at : at + block] = np.arange(start, start + block)
            context.sequences[at : at + block] = slot
            if together:
                at -= before
                context.positions[at : at + block] = np.arange(start - block, start)
                context.sequences[at : at + block] = slot
                shifts[at : at + block] = shift
        if together:
            assert context.source is not None
            in_ring = context.source.rows(context.sequences[:n], context.positions[:n] + shifts)
            context.injected[:n, 0] = in_ring
            self._with_room(lambda: context.inject_and_decode(n, n))
        else:
            self._with_room(lambda: context.decode(n))
        # the first row of a block is that of the newest token itself
        rows = range(before, before + n)
        each = [one if at else None for one in samplers for at in range(block)]
        if not context.queues or n > MOST_QUEUED:
            tokens = context.best(rows, each)
            return Guesses(lambda: _guessed(tokens, block))
        context.choose(rows, each)
        places = [*range(MOST_QUEUED, MOST_QUEUED + n)]
        # an unusable row's token is 0 on the device, too
        return Guesses(
            lambda: _guessed([max(0, token) for token in context.chosen()], block),
            context,
            _guessed(places, block),
        )

    def _inject(self, ids: Iterable[int]) -> None:
        """Inject the waiting rows of these ids in as few calls as possible."""
        context = self._context
        n = 0
        for sequence_id in ids:
            state = self._states[sequence_id]
            for rows in state.rows:
                start = 0
                while start < len(rows):
                    if n == context.n_batch:
                        n = self._flush(n)
                    part = rows[start : start + context.n_batch - n]
                    end = n + len(part)
                    context.injected[n:end] = part
                    context.positions[n:end] = np.arange(state.fed, state.fed + len(part))
                    context.sequences[n:end] = sequence_id
                    state.fed += len(part)
                    n, start = end, start + len(part)
            state.rows.clear()
            state.start = state.fed
        self._flush(n)
        self._trim(ids)

    def _trim(self, ids: Iterable[int]) -> None:
        """Cut the entries of ids with more than RUNNING windows back to one."""
        context = self._context
        for sequence_id in ids:
            state = self._states[sequence_id]
            if state.fed - state.first > RUNNING * self.window:
                context.remove(sequence_id, state.first, state.fed - self.window)
                state.first = state.fed - self.window

    def _flush(self, n: int) -> int:
        if n:
            self._with_room(lambda: self._context.inject(n))
        return 0

    def _with_room(self, call: Callable[[], None]) -> None:
        """Run `call`; if the cache is full, drop the checkpoints' entries and run it again."""
        try:
            call()
        except NoMemorySlot:
            held = [sequence_id for sequence_id in self._states if sequence_id >= self._slots]
            if not held:
                raise
            for sequence_id in held:
                self.free(sequence_id)
            call()


def _guessed(rows: list[int], block: int) -> list[list[int]]:
    return [rows[at + 1 : at + block] for at in range(0, len(rows), block)]
