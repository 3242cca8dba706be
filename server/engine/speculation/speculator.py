"""Speculative decoding as the engine sees it: drafts for a step, checkpoints around it, lessons after it."""

from __future__ import annotations

import logging
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from .acceptance import Confidence
from .base import Order
from .counts import DraftCounts
from .eager import Eager
from .plan import Candidate
from .times import FIRST
from .worth import Worth

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as ListLike

    import numpy.typing as npt

    from server.engine.llama import Context
    from server.engine.runner import Sampled
    from server.engine.scheduler import Chunk, Step
    from server.engine.sequence import Sequence

    from .mtp import MtpDrafter
    from .ngram import NgramDrafter
    from .plan import Plan, Planner
    from .rollback import Rollback
    from .times import StepTimes

log = logging.getLogger(__name__)

NONE: npt.NDArray[np.float64] = np.zeros(0)

PROBE_FIRST, PROBE_LAST = 32, 512
"""Steps without the MTP head after which it is tried all the same, lest a bad hour be held against it: at
first and, doubling while it does not help, at most."""

HOPE = 0.95
"""Acceptance under which the head must at least be able to pay, for such a trial."""

MEASURED = (1, 2, 4, 3, 5, 6, 8, 9, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Rows that the warm-up times: around the sizes at which kernels change."""

PAUSE = 16
"""Where many sequences decode and drafting does not pay, up to so many steps pass before the next look; twice
their number where they are few, none for a single one."""


class Speculator:
    """Asks the drafters, chooses by cost, keeps the way back open, and learns from what comes out.

    The engine's thread calls, step by step: `propose` while the step is made, `prepare` before it is decoded,
    `conclude` when its tokens are known. The cache's copies of sequence ids go through `copy` and `remove`.
    """

    def __init__(
        self,
        context: Context,
        rollback: Rollback,
        planner: Planner | Eager,
        times: StepTimes,
        *,
        ngram: NgramDrafter | None,
        mtp: MtpDrafter | None,
        slots: int,
        longest: int,
        deepest: int,
        most_rows: int,
    ) -> None:
        """Sequences in the first `slots` draft, at most `longest` tokens, by the head at most `deepest`."""
        self._context, self._rollback, self._planner, self.times = context, rollback, planner, times
        self._ngram, self._mtp = ngram, mtp
        self._slots, self._longest, self._deepest, self._most_rows = slots, longest, deepest, most_rows
        self.totals: dict[str, DraftCounts] = {d.name: DraftCounts() for d in (ngram, mtp) if d is not None}
        """By drafter."""
        self._confidences: dict[Sequence, Confidence] = {}
        self._experience = Confidence()
        self._orders: dict[Sequence, Order] = {}
        """What was proposed for the step being made."""
        self._in_flight = False
        self._overhead = 0.0
        self._starts: list[int] = []
        self._copies: list[tuple[int, int]] = []
        self._since_head, self._probe_after = 0, PROBE_FIRST
        self._pause = self._paused = 0
        self._worth = None if isinstance(planner, Eager) else Worth(times)
        self._proposing = 0.0
        """Seconds that the drafts of the step took."""
        self._drafting = ""
        """Who drafted last, as long as the consequences last."""

    def reads(self, step: Step) -> bool:
        """Whether `conclude` will read hidden rows of a step of prompts alone, and so wait for the device."""
        mtp = self._mtp
        return mtp is not None and any(
            mtp.wants(chunk.sequence, start + chunk.count)
            for chunk, start in zip(step.chunks, self._starts, strict=True)
        )

    def stats(self) -> dict[str, DraftCounts]:
        """The totals so far; they do not change later."""
        return {drafter: replace(counts) for drafter, counts in self.totals.items()}

    # --- warming up ----------------------------------------------------------------------------------------

    def measure(self, rehearse: Callable[[int, int], None], seconds: float) -> None:
        """Time verifications of more and more rows, and drafts of the head, in about so many seconds.

        `rehearse(n, length)` verifies `length` rows of each of `n` sequences; `conclude` learns from it.
        """
        deadline = perf_counter() + seconds
        several = [(n, MEASURED[:3]) for n in (2, 4, 8, 16) if n <= self._slots]
        for n, lengths in [(1, MEASURED), *several]:
            for length in lengths:
                late = perf_counter() > deadline and length > MEASURED[1]
                if length > self._longest + 1 or n * length > self._most_rows or late:
                    break
                for _ in range(FIRST):
                    rehearse(n, length)
        if self._mtp is not None:
            self._mtp.measure(self._slots)

    # --- making a step -------------------------------------------------------------------------------------

    def propose(self, sequences: ListLike[Sequence], rows: int) -> list[list[int]]:
        """A draft, perhaps empty, for each of the sequences that decode; at most `rows` tokens in all."""
        started = perf_counter()
        drafts = self._propose(sequences, rows)
        self._proposing = perf_counter() - started
        return drafts

    def _propose(self, sequences: ListLike[Sequence], rows: int) -> list[list[int]]:
        self._orders.clear()
        if self._paused > 0 or len(sequences) > self._slots:
            self._paused -= 1
            return [[] for _ in sequences]
        orders = [Order(sequence, self._limit(sequence)) for sequence in sequences]
        if self._ngram is not None:
            self._ngram.propose(orders)
        candidates = self._candidates(orders)
        if not any(len(candidate.ngram) or candidate.mtp for candidate in candidates):
            return [[] for _ in sequences]
        most_rows = min(self._most_rows, rows + sum(candidate.pending for candidate in candidates))
        plan = self._planner.choose(candidates, most_rows)
        self._pause = 0 if plan.drafts else min(PAUSE, 2 * len(sequences) - 2, 2 * self._pause + 1)
        self._paused = self._pause
        probe = self._probe(plan, candidates, most_rows)
        return self._carry_out(probe or plan, orders, probing=probe is not None)

    def _limit(self, sequence: Sequence) -> int:
        """Tokens that a draft for it may have: the one after the last is sampled too."""
        if sequence.slot is None or sequence.slot >= self._slots:
            return 0
        return max(0, min(self._longest, sequence.limit - len(sequence.tokens) - 1))

    def _candidates(self, orders: list[Order]) -> list[Candidate]:
        """What each may draft from; nothing from a drafter that does not pay for so many."""
        candidates = [self._candidate(order) for order in orders]
        if self._worth is not None:
            by_text, by_head = (self._worth.allows(drafter, len(orders)) for drafter in ("ngram", "mtp"))
            for candidate in candidates:
                candidate.ngram = candidate.ngram if by_text else NONE
                candidate.mtp = candidate.mtp if by_head else ()
        return candidates

    def _candidate(self, order: Order) -> Candidate:
        sequence, ngram = order.sequence, NONE
        if self._ngram is not None and order.tokens:
            ngram = self._ngram.chances(order)
        depth = min(self._deepest, order.limit)
        mtp: tuple[float, ...] = ()
        if self._mtp is not None and depth > 0 and self._mtp.can_draft(sequence):
            mtp = self._confidence(sequence).chances(self._experience, depth)
        return Candidate(sequence.pending, ngram, mtp)

    def _confidence(self, sequence: Sequence) -> Confidence:
        if (confidence := self._confidences.get(sequence)) is None:
            confidence = self._confidences[sequence] = Confidence()
        return confidence

    def _probe(self, plan: Plan, candidates: list[Candidate], most_rows: int) -> Plan | None:
        """Now and then a draft of one token by the head, where it is not used but might pay."""
        if "mtp" in plan.sources:
            self._since_head, self._probe_after = 0, PROBE_FIRST
            return None
        self._since_head += 1
        if plan.drafts or self._since_head < self._probe_after or not any(c.mtp for c in candidates):
            return None
        self._since_head, self._probe_after = 0, min(PROBE_LAST, 2 * self._probe_after)
        hopeful = [Candidate(c.pending, NONE, (HOPE,) * len(c.mtp)) for c in candidates]
        hoped = self._planner.choose(hopeful, most_rows)
        lengths = [min(1, length) for length in hoped.lengths]
        return replace(hoped, lengths=lengths) if hoped.drafts else None

    def _carry_out(self, plan: Plan, orders: list[Order], *, probing: bool) -> list[list[int]]:
        """Have the head draft where the plan says so, and cut what the n-gram drafter has to length."""
        chosen: list[Order] = []
        for order, source, length in zip(orders, plan.sources, plan.lengths, strict=True):
            if source == "mtp":
                confidence = self._confidence(order.sequence)
                trust = confidence.trust(self._experience)
                typical = confidence.chances(self._experience, length)
                order = Order(order.sequence, length, trust, typical)
            else:
                order.tokens = order.tokens[:length]
            chosen.append(order)
        if self._mtp is not None and "mtp" in plan.sources:
            by_head = [order for order, source in zip(chosen, plan.sources, strict=True) if source == "mtp"]
            pending = [order.sequence.pending for order in orders]
            # who has caught up less far would end up with fewer tokens than the others: another pass
            ragged = len(set(pending)) > 1
            self._mtp.propose(by_head, None if probing or ragged else self._planner.floors(plan, pending))
            drafted = zip(pending, chosen, plan.sources, strict=True)
            cut = max(own + len(order.tokens) for own, order, source in drafted if source == "mtp")
            for own, order, source in zip(pending, chosen, plan.sources, strict=True):
                if source == "ngram":  # the head may have stopped early: one length, one pass
                    order.tokens = order.tokens[: max(0, cut - own)]
        self._orders = {order.sequence: order for order in chosen if order.tokens}
        return [order.tokens for order in chosen]

    # --- around a step -------------------------------------------------------------------------------------

    def prepare(self, step: Step) -> None:
        """Before the step is decoded: hold on to the states that drafts may spoil."""
        started = perf_counter()
        self._in_flight = True
        self._starts = [chunk.sequence.cached for chunk in step.chunks]
        for chunk in step.chunks:
            if chunk.draft:
                assert chunk.sequence.slot is not None
                self._rollback.save(chunk.sequence.slot, chunk.sequence.cached)
        self._overhead = perf_counter() - started

    def conclude(
        self, step: Step, places: ListLike[list[int]], sampled: ListLike[Sampled], seconds: float
    ) -> None:
        """After its tokens are known: go back where a draft was wrong, and learn.

        `places` are the indices in the batch of each chunk's tokens; `seconds` is the time from the call of
        decode to the last token. If the step failed, `abandon`.
        """
        started = perf_counter()
        if self._mtp is not None and len(step.chunks) <= self._slots:
            self._collect(self._mtp, step, places, sampled)
        self.abandon()
        for chunk, new in zip(step.chunks, sampled, strict=True):
            if chunk.draft:
                self._judge(chunk, len(new) - 1 if isinstance(new, list) else 0)
        seconds += self._overhead + perf_counter() - started
        self._learn_worth(step, sampled, seconds + self._proposing)
        lengths = {chunk.n_tokens for chunk in step.chunks}
        if len(lengths) == 1 and all(chunk.samples for chunk in step.chunks):
            self.times.add(len(step.chunks), lengths.pop(), seconds)

    def _collect(
        self, mtp: MtpDrafter, step: Step, places: ListLike[list[int]], sampled: ListLike[Sampled]
    ) -> None:
        """Give the head the hidden rows of what was right. Waits for the device if there are any to give."""
        wanted = []
        for chunk, start, mine, new in zip(step.chunks, self._starts, places, sampled, strict=True):
            slot, right = chunk.sequence.slot, chunk.count + (len(new) - 1 if isinstance(new, list) else 0)
            if slot is not None and slot < self._slots and mtp.wants(chunk.sequence, start + right):
                wanted.append((slot, start, mine, right))
        if not wanted:
            return
        hidden = self._context.hidden(step.n_tokens)
        for slot, start, mine, right in wanted:
            together = mine[right - 1] - mine[0] == right - 1
            rows = hidden[mine[0] : mine[0] + right] if together else hidden[mine[:right]]
            mtp.collect(slot, start, rows)

    def _learn_worth(self, step: Step, sampled: ListLike[Sampled], seconds: float) -> None:
        """Book the whole step, drafting included, under who drafted, or as plain."""
        before, plain = self._drafting, all(chunk.n_tokens == 1 for chunk in step.chunks)
        if self._orders:
            self._drafting = "mtp" if any(o.drafter == "mtp" for o in self._orders.values()) else "ngram"
        elif plain:
            self._drafting = ""
        if not all(chunk.samples for chunk in step.chunks):
            return
        if self._worth is None:
            return
        n = len(step.chunks)
        tokens = sum(len(new) for new in sampled if isinstance(new, list))
        if self._drafting:
            self._worth.add(self._drafting, n, tokens, seconds)
        elif plain and not before:
            self._worth.add_plain(n, seconds)

    def abandon(self) -> None:
        """The step is over, computed or not: sequence ids that were to become copies do."""
        self._in_flight = False
        copies, self._copies = self._copies, []
        for source, target in copies:
            self.copy(source, target)

    def _judge(self, chunk: Chunk, accepted: int) -> None:
        sequence, drafted = chunk.sequence, len(chunk.draft)
        if accepted < drafted and sequence.slot is not None:
            self._rollback.restore(sequence.slot)
            if self._mtp is not None:
                self._mtp.ahead(sequence.slot, self._rollback.held(sequence.slot))
        order = self._orders.get(sequence)
        if order is not None:
            self.totals[order.drafter].add(drafted, accepted)
            sequence.drafts.add(drafted, accepted)
            if order.sure:
                self._confidence(sequence).add(order.sure[:drafted], accepted)
                self._experience.add(order.sure[:drafted], accepted)

    # --- what becomes of sequences and ids -----------------------------------------------------------------

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        for drafter in (self._ngram, self._mtp):
            if drafter is not None:
                drafter.forget(sequence)
        self._confidences.pop(sequence, None)
        self._orders.pop(sequence, None)

    def empty(self, slot: int) -> None:
        """A slot was emptied."""
        self._rollback.forget(slot)
        self.remove(slot)

    def copy(self, source: int, target: int) -> None:
        """A sequence id becomes what another is; during a step, not until what that computes is known."""
        if self._mtp is None:
            return
        if self._in_flight:
            self._copies.append((source, target))
        else:
            self._mtp.copy(source, target)

    def remove(self, sequence_id: int) -> None:
        """A sequence id holds nothing any more."""
        self._copies = [copy for copy in self._copies if copy[1] != sequence_id]
        if self._mtp is not None:
            self._mtp.remove(sequence_id)
