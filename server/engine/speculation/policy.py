"""How many tokens to draft: as many as give the most tokens a second by what is known, or none.

Depth by acceptance and cost as in Leviathan et al. 2023, section 3.5, with both measured while it runs. What
lost is not drafted for a while, longer each time (exponential back-off), and then tried again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .acceptance import Acceptance
from .cooldown import Cooldown
from .times import Mean, StepTimes, group_of

if TYPE_CHECKING:
    from collections.abc import Sequence as ListLike

    from .base import Drafter

ROWS = (2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256)
"""Rows of a sequence that are considered, beside the most allowed and those that there is a graph for."""

MARGIN = 1.02
"""Drafting must promise so many times what plain decoding gives."""

STAY = 16
"""Steps over which the time to change to another graph is spread, where its shape is to last."""

OPTIMISM = 0.95
"""Chance of each token that a retry begins with where less could not pay: one draft tells."""

COOLDOWN_FIRST, COOLDOWN_LAST = 128, 1024
"""Steps without drafts that lost: at first and at most. A text changes its character within hundreds."""

BUDGET = 0.0025
"""Share of the time that retries may cost: a cooldown is no longer than keeps them below."""

PROVEN = 16
"""Steps in a row with drafts after which a retry has succeeded."""

LOSS, RETRY_LOSS = 5, 2
"""Steps whose time drafts may lose by their results, what they gained taken off, before they are given up:
fewer where they lost before."""

JUDGED = 8
"""Tokens that a draft may at least have where its not paying is held against it, rather than against the end
of an answer."""


@dataclass(slots=True)
class Record:
    """One kind of drafts for about so many sequences."""

    acceptance: Acceptance
    cooldown: Cooldown = field(default_factory=lambda: Cooldown(COOLDOWN_FIRST, COOLDOWN_LAST))
    retries: bool = False
    """It is tried again after a cooldown, and was not wrong since."""
    fresh: bool = True
    """Nothing was drafted yet: the first time, kernels are loaded."""
    in_a_row: int = 0
    """Steps with such drafts since the last cooldown."""
    loss: float = 0.0
    """Seconds that they lost since, what they gained taken off."""


@dataclass(slots=True)
class Option:
    """What a drafter has, or could have, for each sequence of a step: a kind, "" for nothing, and a limit."""

    drafter: Drafter
    kinds: list[str]
    limits: list[int]


@dataclass(slots=True)
class Plan:
    """Who drafts, and how many tokens for each sequence."""

    drafter: Drafter
    lengths: list[int]


@dataclass(slots=True)
class Step:
    """A decode step that may verify drafts: what is pending of each sequence, and what rollback allows.

    `rewinds` and `keeps_graph` are those of `StateStore`; `shape` the sequences and rows of the last step.
    """

    pending: list[int]
    room: int
    most_rows: int
    rewinds: int = 0
    keeps_graph: int = 0
    shape: tuple[int, int] = (0, 0)


class Policy:
    """Chooses depths and learns from what they give; kinds of drafts apart, and crowds by powers of two."""

    def __init__(self, times: StepTimes) -> None:
        self.times = times
        self.now = 0
        """Steps so far."""
        self.rollback = Mean()
        """Seconds that a checkpoint and the rollback to it take, of drafts longer than `Step.rewinds`."""
        self._records: dict[tuple[str, int], Record] = {}
        self._optimism = Acceptance(OPTIMISM)

    def allowed(self, drafter: Drafter, n: int) -> set[str]:
        """The kinds of a drafter that may be drafted for `n` sequences."""
        return {kind for kind in drafter.kinds if not self._cooldown(drafter, kind, n)}

    def cooldown(self, drafter: Drafter, n: int) -> int:
        """Steps until the first of its kinds may be drafted."""
        return min(self._cooldown(drafter, kind, n) for kind in drafter.kinds)

    def lost(self, drafter: Drafter, n: int) -> bool:
        """True while every kind of the drafter has lost for about `n` sequences and none has paid since."""
        return all(self.record(drafter, kind, n).cooldown.lost for kind in drafter.kinds)

    def request_begins(self) -> None:
        """A drafter in cooldown may be retried earlier for a request that begins."""
        for record in self._records.values():
            record.cooldown.retry_early(self.now)

    def choose(self, options: ListLike[Option], step: Step) -> Plan | None:
        """The best plan for a step; None where nothing beats plain decoding."""
        n = len(step.pending)
        for record in (self.record(one.drafter, kind, n) for one in options for kind in {*one.kinds} - {""}):
            if record.cooldown.lost and not record.in_a_row:
                record.acceptance.retry()
                record.retries = n == 1
        plan = self._best(options, step) or self._best(options, step, retrying=True)
        if plan is not None or max(step.pending) == 1:  # to catch up is no time to judge
            for option in options:
                for kind in {*option.kinds} - {""}:
                    self._judge(option, kind, n, plan)
        return plan

    def _judge(self, option: Option, kind: str, n: int, plan: Plan | None) -> None:
        record, instant = self.record(option.drafter, kind, n), option.drafter.instant
        if plan is None:
            longest = max(
                limit for limit, own in zip(option.limits, option.kinds, strict=True) if own == kind
            )
            if longest >= min(JUDGED, option.drafter.depth):
                untried = n > 1 and not (record.in_a_row or instant)
                self._give_up(record, n, least=COOLDOWN_LAST if untried else 0)
        elif option.drafter is plan.drafter:
            record.in_a_row += 1
            if record.in_a_row >= PROVEN:
                record.cooldown.end()
        elif not (plan.drafter.instant or instant):
            record.acceptance.fade()

    def _best(self, options: ListLike[Option], step: Step, *, retrying: bool = False) -> Plan | None:
        """The best by what is known; or of retries, which begin with a draft that costs little."""
        pending, n = step.pending, len(step.pending)
        seconds = self.times.passes(pending) + self._change(pending, step)
        best, best_rate = None, MARGIN * n / seconds
        for option in options:
            records = [self.record(option.drafter, kind, n) if kind else None for kind in option.kinds]
            if retrying:
                limits = [min(limit, max(2, step.rewinds)) for limit in option.limits]
                known = [self._optimism if one is not None and one.retries else None for one in records]
            else:
                limits, known = option.limits, [None if one is None else one.acceptance for one in records]
            for rows in self._depths(option, step):
                lengths = [
                    rows - own if one is not None and 0 < rows - own <= limit else 0
                    for own, one, limit in zip(pending, known, limits, strict=True)
                ]
                total = sum(lengths)
                if not total or total + sum(pending) > step.most_rows or total > step.room:
                    continue
                right = [
                    one.expected(length) if one else 0.0 for one, length in zip(known, lengths, strict=True)
                ]
                seconds = self._seconds(option.drafter, known, lengths, right, step)
                if (n + sum(right)) / seconds > best_rate:
                    best, best_rate = Plan(option.drafter, lengths), (n + sum(right)) / seconds
        return best

    def _depths(self, option: Option, step: Step) -> list[int]:
        """Rows that are worth a thought."""
        ends = {
            own + min(limit, option.drafter.depth)
            for own, limit, kind in zip(step.pending, option.limits, option.kinds, strict=True)
            if kind
        }
        graph = step.shape[1] if step.shape[0] == len(step.pending) else 0
        most = max(ends, default=0)
        return sorted(ends | {rows for rows in (*ROWS, graph) if min(step.pending) < rows < most})

    def _seconds(
        self,
        drafter: Drafter,
        known: list[Acceptance | None],
        lengths: list[int],
        right: list[float],
        step: Step,
    ) -> float:
        """What a draft takes, in this step and by its consequences."""
        pending, n, times = step.pending, len(step.pending), self.times
        rows = [own + length for own, length in zip(pending, lengths, strict=True)]
        seconds = times.passes(rows) + drafter.cost(sum(map(bool, lengths)), max(lengths))
        if max(lengths) > step.keeps_graph:  # the state moves to another cell
            seconds += times.leaving if drafter.instant or n > 1 else times.building.value
        else:
            seconds += self._change(rows, step, passing=drafter.instant)
        if max(lengths) > step.rewinds:  # what was right is computed again after a wrong draft
            seconds += self.rollback.value
            for own, one, length, good in zip(pending, known, lengths, right, strict=True):
                if one is not None and length:
                    again = times.of(1, n + own + round(good)) - times.of(1, n)
                    seconds += (1 - one.all_right(length)) * again
        return seconds

    def _change(self, rows: list[int], step: Step, *, passing: bool = False) -> float:
        """What it takes to come to the graph for so many rows: for a single step where a text repeats itself
        now and then (`passing`) or something is pending, else for many."""
        if len(set(rows)) == 1 and (len(rows), rows[0]) == step.shape:
            return 0.0
        return self.times.leaving if passing or max(step.pending) > 1 else self.times.moving / STAY

    def verified(self, drafter: Drafter, kind: str, n: int, drafted: int, right: int) -> None:
        """A draft for one of `n` sequences was verified."""
        record = self.record(drafter, kind, n)
        record.acceptance.add(drafted, right)
        record.retries &= right == drafted

    def add(self, drafter: Drafter, kind: str, n: int, tokens: int, seconds: float) -> None:
        """A step with drafts of a kind, or one that catches up after them, gave `n` sequences so many tokens.

        `seconds` is everything: the drafts, the step, the rollback; but for what drafts that go on do not
        take again. Expectations rest on times of shapes that repeat; this is what has the last word.
        """
        record = self.record(drafter, kind, n)
        if record.fresh:
            record.fresh = False
            return
        record.loss = max(0.0, record.loss + seconds - tokens * self.times.of(n, 1) / n)
        if record.loss > (RETRY_LOSS if record.cooldown.lost else LOSS) * seconds:
            self._give_up(record, n)

    def _give_up(self, record: Record, n: int, least: int = 0) -> None:
        """Nothing is drafted for a while, so short that what was lost is a small share of the time."""
        most = 1e9
        if record.in_a_row:  # the way back to the graph without drafts is still to come
            most = (record.loss + self.times.building.value) / (BUDGET * self.times.of(n, 1))
        record.cooldown.begin(self.now, most, least)
        record.in_a_row, record.loss = 0, 0.0

    def record(self, drafter: Drafter, kind: str, n: int) -> Record:
        """What is known of a kind of drafts for about `n` sequences."""
        key = kind, group_of(n)
        if (record := self._records.get(key)) is None:
            record = self._records[key] = Record(Acceptance(drafter.kinds[kind]))
        return record

    def _cooldown(self, drafter: Drafter, kind: str, n: int) -> int:
        return self.record(drafter, kind, n).cooldown.left(self.now)
