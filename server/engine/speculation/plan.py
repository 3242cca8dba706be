"""Which sequences draft, from what and how far: whatever gives the most tokens a second."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from .base import Floors

if TYPE_CHECKING:
    from collections.abc import Sequence as ListLike

    import numpy.typing as npt

    from .times import DraftTimes, StepTimes

Source = Literal["", "ngram", "mtp"]

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 15, 19, 23, 31, 39, 47, 55, 63, 79, 95, 111, 127, 159, 191, 223, 255)
"""Draft lengths that are considered, beside the longest allowed: one less than rows that divide well."""

_LENGTHS = np.array(LENGTHS)

ROWS = 2048
"""Rows of one sequence up to which times are tabled; longer drafts are not considered."""

STAY = 16
"""Steps over which the time to change to another graph is spread, where the shape it is for is to last."""

MARGIN = 1.05
"""Drafting must promise this much more than not drafting: an estimate is not worth a change of shape."""

CAUTION = 1.5
"""The same for drafts of the head in a crowd. They make its steps ragged, take a graph each, part who went
together: on an H200, eight sequences took twice as long for their tokens as rehearsals of even lengths."""


@dataclass(slots=True)
class Candidate:
    """One sequence that decodes: how many tokens it brings anyway, and what its drafts may be worth."""

    pending: int
    ngram: npt.NDArray[np.float64]
    """For each token of its draft the chance that it is right if those before it are."""
    mtp: tuple[float, ...]
    """The same for the tokens that the MTP head may draft."""
    lasting: int = 0
    """Tokens of the longest draft that leaves a graph for the next one, accepted or not (`rollback.py`)."""
    undone: int = 0
    """Tokens of the longest draft of which what was right stays, where the rest is wrong."""

    @property
    def by_head(self) -> npt.NDArray[np.float64]:
        """As `ngram`."""
        return np.array(self.mtp)


@dataclass(slots=True)
class Plan:
    """A draft's source and length for each sequence, and what is expected of the step."""

    sources: list[Source]
    lengths: list[int]
    tokens: float
    seconds: float

    @property
    def drafts(self) -> bool:
        """Whether anything is drafted at all."""
        return any(self.lengths)


@dataclass(slots=True)
class Prospect:
    """What drafts of 0, 1, 2... tokens promise for the step, and what they may cost later."""

    tokens: list[float] = field(default_factory=lambda: [1.0])
    redo: list[float] = field(default_factory=lambda: [0.0])
    """Seconds: after a rejection the pending and the accepted tokens are decoded once more."""

    @property
    def longest(self) -> int:
        """Tokens of the longest draft."""
        return len(self.tokens) - 1


class Planner:
    """Weighs plans with measured times. Costs some tens of microseconds for a few sequences."""

    def __init__(self, times: StepTimes, draft_times: DraftTimes) -> None:
        self._times, self._draft_times = times, draft_times
        self._tables: dict[int, tuple[list[float], npt.NDArray[np.float64]]] = {}
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._age = 0
        self.shape = (0, 0)
        """Sequences and tokens of the last step, for which there is a graph."""

    def choose(self, candidates: ListLike[Candidate], most_rows: int) -> Plan:
        """The plan with the most expected tokens a second, of at most `most_rows` rows in all."""
        self._age += 1
        if self._age % 32 == 0:  # the times have been corrected since
            self._tables.clear()
            self._plans.clear()
        if any(len(candidate.ngram) for candidate in candidates):
            return self._choose(candidates, most_rows)
        # without drafts the head's chances stay as they are, and so does the plan
        key = (most_rows, self.shape, *((c.pending, c.mtp, c.lasting) for c in candidates))
        if (plan := self._plans.get(key)) is None:
            plan = self._plans[key] = self._choose(candidates, most_rows)
        return plan

    def _choose(self, candidates: ListLike[Candidate], most_rows: int) -> Plan:
        n = len(candidates)
        pending = [candidate.pending for candidate in candidates]
        seconds = self._passes(pending)
        nothing = Plan([""] * n, [0] * n, float(n), seconds)
        if n == 1:
            return self._choose_for_one(candidates[0], nothing, most_rows)
        if not self._may_pay(candidates, nothing, most_rows):
            return nothing
        return self._choose_for_many(candidates, nothing, most_rows)

    def floors(self, plan: Plan, pending: ListLike[int], *, lasting: bool = False) -> Floors | None:
        """What a round of drafting must promise: its share of the step's time, at the plan's rate.

        None where the graph is `lasting`, and to leave for another and come back takes more than the draft.
        """
        draft = self._draft_times.of(plan.sources.count("mtp"))
        if lasting and self._times.leaving > draft * max(plan.lengths):
            return None
        start = min(max(pending), ROWS - 2 - max(plan.lengths))
        table, rate = self._table(len(pending)), plan.tokens / plan.seconds
        ends = range(start + 1, start + 1 + max(plan.lengths) + 1)
        rows = [max(0.0, table[end] - table[end - 1]) * rate for end in ends]
        return Floors(go_on=[row + draft * rate for row in rows], keep=rows)

    def _choose_for_one(self, candidate: Candidate, nothing: Plan, most_rows: int) -> Plan:
        table, own, times = self._array(1), candidate.pending, self._times
        there = self.shape[1] if self.shape[0] == 1 else 0  # rows for which there is a graph
        best = nothing
        rate = MARGIN * nothing.tokens / (nothing.seconds + (0.0 if there == own else times.moving / STAY))
        sources: tuple[tuple[Source, npt.NDArray[np.float64]], ...] = (
            ("ngram", candidate.ngram),
            ("mtp", candidate.by_head),
        )
        for source, chances in sources:
            longest = min(len(chances), most_rows - own, ROWS - 2 - own)
            if longest < 1:
                continue
            survive = np.cumprod(chances[:longest])
            alike = [there - own] if 0 < there - own < longest else []
            lengths = np.array([*_LENGTHS[: np.searchsorted(_LENGTHS, longest)], *alike, longest])
            tokens = 1 + np.cumsum(survive)[lengths - 1]
            seconds = table[own + lengths]
            if source == "mtp":
                seconds = seconds + lengths * self._draft_times.of(1) + self._draft_times.besides.value
            # a draft by the head is followed by another, one from the text most often by none
            once, change = times.leaving, times.leaving
            if source == "mtp":
                once, change = times.building.value, times.moving / STAY
            staying = np.where(own + lengths == there, 0.0, change)
            later = np.where(lengths > candidate.lasting, once, staying)
            again = np.where(lengths > candidate.undone, self._redo(survive, own, 1)[lengths - 1], 0.0)
            rates = tokens / (seconds + later + again)
            i = int(rates.argmax())
            if rates[i] > rate:
                rate = float(rates[i])
                best = Plan([source], [int(lengths[i])], float(tokens[i]), float(seconds[i]))
        return best

    def _may_pay(self, candidates: ListLike[Candidate], nothing: Plan, most_rows: int) -> bool:
        """Whether drafting would pay if all had the best chances of any, and nothing but rows took time."""
        n = len(candidates)
        best = max(
            (chances for c in candidates for chances in (c.ngram, c.by_head)),
            key=lambda chances: float(chances[:8].sum()),
        )
        longest = min(len(best), most_rows // n - 1, ROWS - 3)
        if longest < 1:
            return False
        tokens = n * (1 + np.cumsum(np.cumprod(best[:longest])))
        rates = tokens / self._array(n)[2 : 2 + longest]
        return bool(rates.max() > MARGIN * nothing.tokens / nothing.seconds)

    def _choose_for_many(self, candidates: ListLike[Candidate], nothing: Plan, most_rows: int) -> Plan:
        n, best, plain = len(candidates), nothing, nothing.tokens / nothing.seconds
        rate = MARGIN * plain
        pending = [candidate.pending for candidate in candidates]
        ngrams = [self._prospect(candidate.ngram, candidate.pending, n) for candidate in candidates]
        mtps = [self._prospect(candidate.by_head, candidate.pending, n) for candidate in candidates]
        longest = min(max(p.longest for p in (*ngrams, *mtps)), most_rows // n)
        start = max(pending)
        for more in sorted({0, *(more for more in LENGTHS if more < longest), longest}):
            length = start + more
            if length == min(pending) or length * n > most_rows:
                continue
            plan, cost = self._weigh(length, pending, ngrams, mtps)
            if plan.tokens / cost > (max(rate, CAUTION * plain) if "mtp" in plan.sources else rate):
                best, rate = plan, plan.tokens / cost
        return best

    def _weigh(
        self, length: int, pending: list[int], ngrams: list[Prospect], mtps: list[Prospect]
    ) -> tuple[Plan, float]:
        sources: list[Source] = []
        lengths: list[int] = []
        tokens = redo = 0.0
        for own, ngram, mtp in zip(pending, ngrams, mtps, strict=True):
            n = length - own
            source: Source = ""
            if n > 0:
                by_ngram = ngram.tokens[n] if n <= ngram.longest else 0.0
                by_mtp = mtp.tokens[n] if n <= mtp.longest else 0.0
                if by_ngram or by_mtp:
                    source = "ngram" if by_ngram >= 0.95 * by_mtp else "mtp"
            prospect, n = (ngram if source == "ngram" else mtp), n if source else 0
            sources.append(source)
            lengths.append(n)
            tokens += prospect.tokens[n]
            redo += prospect.redo[n]
        seconds = self._passes([own + n for own, n in zip(pending, lengths, strict=True)])
        if drafting := sources.count("mtp"):
            depth = max(n for n, source in zip(lengths, sources, strict=True) if source == "mtp")
            seconds += depth * self._draft_times.of(drafting) + self._draft_times.besides.value
        return Plan(sources, lengths, tokens, seconds), seconds + redo + self._times.leaving

    def _prospect(self, chances: npt.NDArray[np.float64], pending: int, n: int) -> Prospect:
        chances = chances[: max(0, ROWS - 1 - pending - n)]
        if not len(chances):
            return Prospect()
        survive = np.cumprod(chances)
        tokens, redo = 1 + np.cumsum(survive), self._redo(survive, pending, n)
        return Prospect([1.0, *tokens.tolist()], [0.0, *redo.tolist()])

    def _redo(self, survive: npt.NDArray[np.floating], pending: int, n: int) -> npt.NDArray[np.float64]:
        """Seconds that a draft of 1, 2... tokens costs later: after an error, what was right comes again."""
        table = self._array(1)
        ends = np.append(1.0, survive[:-1]) - survive  # the draft's first error is here
        extra = table[n + pending : n + pending + len(survive)] - table[n]
        redo: npt.NDArray[np.float64] = np.cumsum(ends * extra)
        return redo

    def _passes(self, lengths: list[int]) -> float:
        """Seconds of a call whose sequences bring these numbers of tokens.

        llama.cpp takes as many tokens of each as the shortest has left, again and again (`split_equal`).
        """
        seconds, done = 0.0, 0
        for length in sorted(set(lengths)):
            n = sum(other >= length for other in lengths)
            seconds += self._table(n)[min(length - done, ROWS - 1)]
            done = length
        return seconds

    def _table(self, n: int) -> list[float]:
        """Seconds of a pass of `n` sequences by tokens of each."""
        return self._both(n)[0]

    def _array(self, n: int) -> npt.NDArray[np.float64]:
        return self._both(n)[1]

    def _both(self, n: int) -> tuple[list[float], npt.NDArray[np.float64]]:
        if (both := self._tables.get(n)) is None:
            array = self._times.of(n, np.arange(ROWS))
            both = self._tables[n] = array.tolist(), array
        return both
