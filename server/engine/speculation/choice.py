"""Which drafts a step makes: the planner, asked no more often than it may have something new to say."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from .acceptance import Confidence
from .eager import Eager
from .plan import Candidate
from .rest import Rest
from .times import group_of
from .worth import Worth

if TYPE_CHECKING:
    import numpy.typing as npt

    from server.engine.sequence import Sequence

    from .base import Floors, Order
    from .mtp import MtpDrafter
    from .ngram import NgramDrafter
    from .plan import Plan, Planner
    from .rollback import Rollback
    from .times import StepTimes

NONE: npt.NDArray[np.float64] = np.zeros(0)

PROBE_FIRST, PROBE_FIRST_BUILT, PROBE_LAST = 32, 128, 2048
"""Steps without the MTP head after which it is tried again as if little were known of it, lest a bad hour be
held against it: at first (where trials build graphs, they cost more) and, four times as many each time that
it does not help, at most."""

HOPE, HOPEFUL = 0.95, 2
"""Acceptance for which it is tried, for a lone sequence, where it can not pay by what is usual; one draft
tells, of so many tokens or as many as can be taken back for nothing."""

PROVEN, REPLAN = 16, 4
"""Steps in a row with drafts of the head after which a trial has succeeded; from there on, a plan for a lone
sequence holds for so many."""

PAUSE_FIRST, PAUSE_LAST = 2, 32
"""Where several sequences decode and drafting does not pay, so many steps pass before the next look."""


LISTENS = 64
"""Steps before its next draft from which on what the trunk reads is kept for the head, which guesses better
with some text before its eyes; a rest must be twice as long for it to pay that nothing is kept, since to
change over takes a graph each time."""


class Choice:
    """Knows how right the head has been, lets who does not pay rest, and tries again.

    What plans promise is one judge: without a better one for so many sequences, the head rests for a while.
    What steps gave is the other (`worth.py`): it stops drafts whose plans promise more than they keep.
    """

    def __init__(
        self,
        planner: Planner | Eager,
        times: StepTimes,
        rollback: Rollback,
        *,
        ngram: NgramDrafter | None,
        mtp: MtpDrafter | None,
        deepest: int,
        most_rows: int,
    ) -> None:
        self._planner, self._rollback, self._ngram, self._mtp = planner, rollback, ngram, mtp
        self._deepest, self._most_rows = deepest, most_rows
        self.worth = None if isinstance(planner, Eager) else Worth(times)
        self._confidences: dict[Sequence, Confidence] = {}
        self._experience = Confidence()
        self._head_is_due = False
        self._rests: dict[int, Rest] = {}
        """Of the head, by the number of sequences that it would draft for."""
        self._promised: dict[int, tuple[bool, int]] = {}
        """Whether the head might pay, by the number of sequences, and steps for which that stands."""
        self._pause = Rest(PAUSE_FIRST, PAUSE_LAST)
        self._in_a_row = 0
        """Steps with drafts of the head since it was last given up."""
        self._standing: tuple[Sequence | None, Plan | None] = None, None
        """Its last plan for a lone sequence."""

    def is_due(self, n: int) -> bool:
        """Whether anybody is to be asked for drafts for `n` sequences. To be called once a step."""
        if n > 1 and not self._pause.over():
            return False
        self._head_is_due = self._mtp is not None and self._rest(n).over()
        if self._head_is_due and self.worth is not None:
            self._head_is_due = self.worth.allows("mtp", n)
        return self._head_is_due or self._ngram is not None

    def listens(self, n: int, listened: bool) -> bool:
        """Whether the head may draft for `n` sequences so soon that it should know what is read now; and
        whether it did before."""
        if self._mtp is None:
            return False
        left = self._rest(n).left + (0 if self.worth is None else self.worth.left("mtp", n))
        return left <= (2 * LISTENS if listened else LISTENS) and (n == 1 or self._promises(n))

    def _promises(self, n: int) -> bool:
        """Whether a crowd of `n` might draft by the head, by what is known of it; looked at now and then."""
        group = group_of(n)
        promise, left = self._promised.get(group, (False, 0))
        if not left:
            chances = Confidence().chances(self._experience, self._deepest)
            plan = self._planner.choose([Candidate(1, NONE, chances)] * n, self._most_rows)
            promise, left = "mtp" in plan.sources, LISTENS
        self._promised[group] = promise, left - 1
        return promise

    def plan(self, orders: list[Order], rows: int) -> Plan | None:
        """The best plan with at most `rows` drafted tokens in all; None to draft nothing.

        The orders hold what the text gave.
        """
        head, n = self._head_is_due, len(orders)
        if not head and not any(order.tokens for order in orders):
            return None
        if head and (standing := self._stands(orders)) is not None:
            self._in_a_row += 1
            return standing
        trial = head and n == 1 and self._rest(n).begun and not self._in_a_row
        if trial:  # as if little were known of it
            self._experience.forget()
            for order in orders:
                self.confidence(order.sequence).forget()
        kinds = {order.judged for order in orders if order.tokens}
        allowed = {kind for kind in kinds if self.worth is None or self.worth.allows(kind, n)}
        candidates = [self._candidate(order, n, order.judged in allowed) for order in orders]
        if not any(len(candidate.ngram) or candidate.mtp for candidate in candidates):
            return None
        most_rows = min(self._most_rows, rows + sum(candidate.pending for candidate in candidates))
        plan = self._planner.choose(candidates, most_rows)
        if trial and not plan.drafts:
            hopeful = [replace(c, ngram=NONE, mtp=_hopes(c)) for c in candidates]
            plan = self._planner.choose(hopeful, most_rows)
        self._learn_verdict(plan, candidates)
        self._standing = (orders[0].sequence, plan) if plan.sources == ["mtp"] else (None, None)
        return plan if plan.drafts else None

    def floors(self, plan: Plan, orders: list[Order]) -> Floors | None:
        """Where the head may stop early; None for nowhere: it would cost another pass, or a graph."""
        pending, n = [order.sequence.pending for order in orders], len(orders)
        lasting = n == 1 and plan.lengths[0] <= self._rollback.keeps_shape(orders[0].slot, n)
        return None if len(set(pending)) > 1 else self._planner.floors(plan, pending, lasting=lasting)

    def confidence(self, sequence: Sequence) -> Confidence:
        """How right the head has been about a sequence."""
        if (confidence := self._confidences.get(sequence)) is None:
            confidence = self._confidences[sequence] = Confidence()
        return confidence

    def record(self, sequence: Sequence, length: int) -> tuple[float, tuple[float, ...]]:
        """How far the head's word is good for it, and the usual chances of `length` tokens."""
        confidence = self.confidence(sequence)
        return confidence.errors(self._experience), confidence.chances(self._experience, length)

    def learn(self, sequence: Sequence, sure: list[float], accepted: int) -> None:
        """A draft of the head, as sure of its tokens as that, came out."""
        self.confidence(sequence).add(sure, accepted)
        self._experience.add(sure, accepted)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._confidences.pop(sequence, None)
        if self._standing[0] is sequence:
            self._standing = None, None

    def _stands(self, orders: list[Order]) -> Plan | None:
        """The plan of the step before, if it need not be made anew yet."""
        [order, *others], (sequence, plan) = orders, self._standing
        if plan is None or others or order.sequence is not sequence or order.tokens:
            return None
        if self._in_a_row < PROVEN or not self._in_a_row % REPLAN or order.limit < plan.lengths[0]:
            return None
        return plan if self._mtp is not None and self._mtp.can_draft(sequence) else None

    def _candidate(self, order: Order, n: int, by_text: bool) -> Candidate:
        sequence, ngram = order.sequence, NONE
        if by_text and self._ngram is not None:
            ngram = self._ngram.chances(order)
        depth = min(self._deepest, order.limit)
        mtp: tuple[float, ...] = ()
        if self._mtp is not None and self._head_is_due and depth > 0 and self._mtp.can_draft(sequence):
            mtp = self.confidence(sequence).chances(self._experience, depth)
        assert sequence.slot is not None
        lasting = self._rollback.keeps_shape(sequence.slot, n)
        return Candidate(sequence.pending, ngram, mtp, lasting, self._rollback.undoes(sequence.slot, n))

    def _learn_verdict(self, plan: Plan, candidates: list[Candidate]) -> None:
        """Have the head, or everybody, rest where it does not pay."""
        n = len(candidates)
        if plan.drafts:
            self._pause.end()
        elif n > 1:
            self._pause.begin()
        if "mtp" in plan.sources:
            self._in_a_row += 1
            if self._in_a_row >= PROVEN:
                self._rest(n).end()
        elif not plan.drafts and any(candidate.mtp for candidate in candidates):
            self._in_a_row = 0
            self._rest(n).begin()

    def _rest(self, n: int) -> Rest:
        group = group_of(n)
        if (rest := self._rests.get(group)) is None:
            first = PROBE_FIRST if self._rollback.undoes(0, n) else PROBE_FIRST_BUILT
            rest = self._rests[group] = Rest(first, PROBE_LAST, growth=4)
        return rest


def _hopes(candidate: Candidate) -> tuple[float, ...]:
    return (HOPE,) * min(len(candidate.mtp), max(candidate.undone, HOPEFUL))
