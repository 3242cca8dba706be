"""Chooses how many tokens to draft: as many as are expected to give the most tokens a second, or none.

The depth follows from acceptance and cost as in Leviathan et al. 2023, section 3.5; both are measured while
the server runs. Of several sequences each has a depth of its own where a pass takes any lengths: tokens are
added in the order of the chance that they are right, each sequence's by its own results, as long as the step
gives more tokens a second. A drafter that lost time is paused, longer each time (exponential back-off), and
then tried again. The constants were chosen on simulated cards (tests/server/engine/speculation/card.py is
one); test_loads.py compares the choices with the best fixed depths.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from .acceptance import MEMORY, Acceptance, chances_of
from .base import Drafter
from .cooldown import Cooldown
from .times import CACHED, Mean, StepTimes, group_of

ROWS = (2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256)
"""Rows of a sequence that are considered, besides the maximum and the shape of llama.cpp's graph."""

MARGIN = 1.02
"""Drafting must be expected to give this many times the tokens a second of plain decoding."""

STAY = 16
"""Steps over which the time to change to another graph is spread, if its shape is expected to last."""

OWN_MEMORY, CROWD = 8 * MEMORY, 16
"""Tries of a single sequence of several that are remembered; with fewer, luck would decide who drafts. Tries
of all together are remembered for as many steps as those of a lone one, up to CROWD sequences."""

OWN_FADE = 0.01
"""Share of a sequence's own results that is forgotten in a step in which it is not drafted for, so that it is
tried again."""

IDLE, IDLE_FADE = 8, 0.3
"""Steps in a row in which no plan pays for several sequences, after which a cooldown begins; and the share of
each sequence's own results that is forgotten in each of them, since bad luck may be the reason."""

DOUBTFUL = 0.1
"""Of several sequences, tokens that are right less often than this are not drafted."""

CHANGES = 0.5
"""How often another number of rows than that of the last step is followed by yet another."""

REDONE = 16
"""Rows over which the cost of a row is averaged, for tokens that are computed again."""

OPTIMISM = 0.95
"""Acceptance of each token that a retry assumes if drafts cannot pay with the known one. One draft tests
it."""

COOLDOWN_FIRST, COOLDOWN_LAST = 128, 1024
"""Steps of a cooldown, first and maximum. A text changes its character within hundreds of steps."""

BUDGET = 0.0025
"""A cooldown is no longer than needed for a retry to take this share of the time."""

PROVEN = 16
"""Consecutive steps with drafts after which a retry counts as successful."""

LOSS = 5
"""Net loss, in the time of steps, that starts a cooldown."""

JUDGED = 8
"""Drafts that do not pay go into cooldown only if they may have at least this many tokens, since shorter
limits come from the end of an answer."""


@dataclass(slots=True)
class Record:
    """What is known of one kind of drafts for one group of sequence counts."""

    acceptance: Acceptance
    cooldown: Cooldown = field(default_factory=lambda: Cooldown(COOLDOWN_FIRST, COOLDOWN_LAST))
    retries: bool = False
    """Whether a retry after a cooldown is in progress and no draft was wrong since."""
    fresh: bool = True
    """Whether no draft was timed yet; the first one loads kernels."""
    in_a_row: int = 0
    """Steps with such drafts since the last cooldown."""
    idle: int = 0
    """Steps in a row in which no plan paid."""
    loss: float = 0.0
    """Net seconds lost since the last cooldown."""


@dataclass(slots=True)
class Option:
    """What a drafter can draft for each sequence of a step: a kind ("" for nothing) and a limit in tokens."""

    drafter: Drafter
    kinds: list[str]
    limits: list[int]


@dataclass(slots=True)
class Plan:
    """The drafter to use, and how many tokens it drafts for each sequence."""

    drafter: Drafter
    lengths: list[int]


@dataclass(slots=True)
class Step:
    """A decode step that may verify drafts: pending tokens of each sequence, and limits.

    `rewinds` and `keeps_graph` are as in `StateStore`; `shape` is the sequences and rows of the last step.
    """

    pending: list[int]
    room: int
    most_rows: int
    rewinds: int = 0
    keeps_graph: int = 0
    shape: tuple[int, int] = (0, 0)
    owners: list[Hashable] = field(default_factory=list)
    """The sequences, if there are several and each is judged by its own results."""


class Policy:
    """Chooses draft lengths. Learns from results, by kind of draft and by number of sequences (powers of
    two)."""

    def __init__(self, times: StepTimes) -> None:
        self.times = times
        self.now = 0
        """Steps so far."""
        self.rollback = Mean()
        """Seconds of a checkpoint and the rollback to it, for drafts longer than `Step.rewinds`."""
        self._records: dict[tuple[str, int], Record] = {}
        self._own: dict[Hashable, dict[str, Acceptance]] = {}
        """Results of single sequences, by kind."""
        self._optimism = Acceptance(OPTIMISM)

    def allowed(self, drafter: Drafter, n: int) -> set[str]:
        """The kinds of a drafter that are not in cooldown for `n` sequences."""
        return {kind for kind in drafter.kinds if not self._cooldown(drafter, kind, n)}

    def cooldown(self, drafter: Drafter, n: int) -> int:
        """Steps until the first of its kinds leaves cooldown."""
        return min(self._cooldown(drafter, kind, n) for kind in drafter.kinds)

    def lost(self, drafter: Drafter, n: int) -> bool:
        """True while every kind of the drafter has lost for about `n` sequences and none has paid since."""
        return all(self.record(drafter, kind, n).cooldown.lost for kind in drafter.kinds)

    def forget(self, owner: Hashable) -> None:
        """Drop the results of a sequence that ended."""
        self._own.pop(owner, None)

    def request_begins(self) -> None:
        """Allow earlier retries of drafters in cooldown for a new request."""
        for record in self._records.values():
            record.cooldown.retry_early(self.now)

    def choose(self, options: Sequence[Option], step: Step) -> Plan | None:
        """The best plan for a step; None if none beats plain decoding."""
        n = len(step.pending)
        for record in (self.record(one.drafter, kind, n) for one in options for kind in {*one.kinds} - {""}):
            if record.cooldown.lost and not record.in_a_row:
                record.acceptance.retry()
                record.retries = n == 1 or self._apart(step)
            elif record.fresh and self._apart(step):  # one draft tells more than what is assumed
                record.retries = True
        plan = self._best(options, step) or self._best(options, step, retrying=True)
        if plan is not None or max(step.pending) == 1:  # a step that catches up shows nothing about drafts
            for option in options:
                for kind in {*option.kinds} - {""}:
                    self._judge(option, kind, n, plan, apart=self._apart(step))
        for owner, length in zip(step.owners, plan.lengths if plan else [0] * n, strict=False):
            for own in self._own.get(owner, {}).values() if not length else ():
                own.fade(OWN_FADE if plan else IDLE_FADE)
        return plan

    def _apart(self, step: Step) -> bool:
        """Whether each sequence may have a depth of its own."""
        return bool(step.owners) and self.times.ragged

    def _judge(self, option: Option, kind: str, n: int, plan: Plan | None, *, apart: bool) -> None:
        record, instant = self.record(option.drafter, kind, n), option.drafter.instant
        if plan is None:
            longest = max(
                limit for limit, own in zip(option.limits, option.kinds, strict=True) if own == kind
            )
            record.idle += 1
            if longest >= min(JUDGED, option.drafter.depth) and record.idle >= (IDLE if apart else 1):
                untried = n > 1 and not (record.in_a_row or instant)
                self._give_up(record, n, least=COOLDOWN_LAST if untried else 0)
        elif option.drafter is plan.drafter:
            record.in_a_row += 1
            record.idle = 0
            if record.in_a_row >= PROVEN:
                record.cooldown.end()
        elif not (plan.drafter.instant or instant):
            record.acceptance.fade()

    def _best(self, options: Sequence[Option], step: Step, *, retrying: bool = False) -> Plan | None:
        """The best plan by known acceptance. With `retrying` the best retry, which drafts few tokens."""
        pending, n = step.pending, len(step.pending)
        seconds = self.times.without_drafts(n) if max(pending) == 1 else self.times.passes(pending)
        seconds += self._change(pending, step)
        best, best_rate = None, MARGIN * n / seconds
        for option in options:
            records = [self.record(option.drafter, kind, n) if kind else None for kind in option.kinds]
            limits, known = option.limits, [None if one is None else one.acceptance for one in records]
            if retrying:
                limits = [min(limit, max(2, step.rewinds)) for limit in option.limits]
                known = [self._optimism if one is not None and one.retries else None for one in records]
            own: list[Acceptance | None] = [None] * n
            if step.owners:
                own = [
                    self._own.get(owner, {}).get(kind)
                    for owner, kind in zip(step.owners, option.kinds, strict=True)
                ]
            if retrying:  # whose drafts were wrong is not tried again for the sake of others
                known = [one if mine is None else None for one, mine in zip(known, own, strict=True)]
            plans = (
                self._uneven(option, known, own, limits, step)
                if self._apart(step)
                else self._even(option, known, limits, step)
            )
            for lengths, rate in plans:
                if rate > best_rate:
                    best, best_rate = Plan(option.drafter, lengths), rate
        return best

    def _even(
        self,
        option: Option,
        known: list[Acceptance | None],
        limits: list[int],
        step: Step,
    ) -> Iterator[tuple[list[int], float]]:
        """Plans with as many rows for each sequence, and their tokens a second."""
        pending, n = step.pending, len(step.pending)
        for rows in self._depths(option, step):
            lengths = [
                rows - own if one is not None and 0 < rows - own <= limit else 0
                for own, one, limit in zip(pending, known, limits, strict=True)
            ]
            total = sum(lengths)
            if not total or total + sum(pending) > step.most_rows or total > step.room:
                continue
            right = [one.expected(length) if one else 0.0 for one, length in zip(known, lengths, strict=True)]
            seconds = self._seconds(option.drafter, known, lengths, right, step)
            yield lengths, (n + sum(right)) / seconds

    def _uneven(
        self,
        option: Option,
        known: list[Acceptance | None],
        own: list[Acceptance | None],
        limits: list[int],
        step: Step,
    ) -> Iterator[tuple[list[int], float]]:
        """The best plan in which the likeliest tokens down to some depth are drafted, whoever's they are, and
        its tokens a second."""
        n, before, times, drafter = len(step.pending), sum(step.pending), self.times, option.drafter
        room = min(step.room, step.most_rows - before, CACHED - before)
        limits = [min(limit, drafter.depth) if one else 0 for one, limit in zip(known, limits, strict=True)]
        deepest, drafting = min(max(limits), room), sum(map(bool, limits))
        if deepest <= 0:
            return
        seconds = times.totals(n)
        each = (seconds[min(CACHED, before + REDONE)] - seconds[before]) / REDONE
        chances = chances_of(own, known, deepest)
        chances[np.arange(deepest) >= np.array(limits)[:, None]] = 0
        # rows that are computed again: all pending ones and the right ones, unless the whole draft is right
        redone = (1 - chances) * np.array(step.pending)[:, None]
        redone += np.cumsum(chances, axis=1) - np.arange(1, deepest + 1) * chances
        redone = np.diff(redone, axis=1, prepend=0)
        order = np.argsort(-chances, axis=None, kind="stable")[: np.count_nonzero(chances >= DOUBTFUL)]
        if not len(order):
            return
        ends = np.array(self._ends(drafter, drafting, deepest, step))
        chosen = (order % deepest)[None, :] < ends[:, None]  # [maximum depths, tokens]
        drafted = np.cumsum(chosen, axis=1)
        chosen &= drafted <= room
        totals = np.minimum(before + drafted, CACHED)
        keeps_graph = (totals == step.shape[1]) & (step.shape[0] == n)
        spent = seconds[totals] + np.where(keeps_graph, 0.0, times.building.value * CHANGES)
        again = each * np.cumsum(chosen * redone.flat[order], axis=1) + self.rollback.value
        spent += np.where(ends[:, None] > step.rewinds, again, 0.0)
        spent += np.array([drafter.cost(drafting, int(depth)) for depth in ends])[:, None]
        rates = np.where(chosen, (n + np.cumsum(chosen * chances.flat[order], axis=1)) / spent, 0.0)
        depth, last = np.unravel_index(np.argmax(rates), rates.shape)
        rows = (order // deepest)[: last + 1][chosen[depth, : last + 1]]
        yield np.bincount(rows, minlength=n).tolist(), float(rates[depth, last])

    def _ends(self, drafter: Drafter, n: int, deepest: int, step: Step) -> list[int]:
        """Maximum depths to consider: all, if deeper drafts take longer to make."""
        if drafter.cost(n, deepest) > drafter.cost(n, 1):
            return [*range(1, min(deepest, ROWS[7]) + 1), *(rows for rows in ROWS[8:] if rows <= deepest)]
        return sorted({deepest, min(deepest, max(1, step.rewinds))})

    def _depths(self, option: Option, step: Step) -> list[int]:
        """Numbers of rows to consider."""
        ends = {
            own + min(limit, option.drafter.depth)
            for own, limit, kind in zip(step.pending, option.limits, option.kinds, strict=True)
            if kind
        }
        graph = step.shape[1] // step.shape[0] if step.shape[0] == len(step.pending) else 0
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
        """Expected seconds that a draft costs, in this step and in later ones."""
        pending, n, times = step.pending, len(step.pending), self.times
        rows = [own + length for own, length in zip(pending, lengths, strict=True)]
        seconds = times.passes(rows) + drafter.cost(sum(map(bool, lengths)), max(lengths))
        if max(lengths) > step.keeps_graph:  # the state moves to another cell
            seconds += times.leaving if drafter.instant or n > 1 else times.building.value
        else:
            seconds += self._change(rows, step, passing=drafter.instant)
        if max(lengths) > step.rewinds:  # after a wrong draft accepted tokens are computed again
            seconds += self.rollback.value
            for own, one, length, good in zip(pending, known, lengths, right, strict=True):
                if one is not None and length:
                    again = times.of(1, n + own + round(good)) - times.of(1, n)
                    seconds += (1 - one.all_right(length)) * again
        return seconds

    def _change(self, rows: list[int], step: Step, *, passing: bool = False) -> float:
        """Seconds to change to the graph for these rows. They count in full if the change is for one step, as
        for text that repeats only sometimes (`passing`) or for pending tokens; otherwise they are spread over
        steps."""
        if (self.times.ragged or len(set(rows)) == 1) and (len(rows), sum(rows)) == step.shape:
            return 0.0
        return self.times.leaving if passing or max(step.pending) > 1 else self.times.moving / STAY

    def verified(
        self, drafter: Drafter, kind: str, n: int, drafted: int, right: int, owner: Hashable = None
    ) -> None:
        """Record a verified draft for one of `n` sequences, `owner`, of which `right` tokens were
        accepted."""
        record = self.record(drafter, kind, n)
        if owner is not None:
            self._own.setdefault(owner, {}).setdefault(kind, Acceptance(0.0, OWN_MEMORY)).add(drafted, right)
        record.acceptance.add(drafted, right)
        record.retries &= right == drafted

    def add(self, drafter: Drafter, kind: str, n: int, tokens: int, seconds: float) -> None:
        """Record a step with drafts of a kind, or one that catches up after them. It gave `n` sequences
        `tokens`.

        `seconds` is the total of drafts, step and rollback, without costs that continued drafting pays only
        once. Plans rest on expected times; this measured time decides whether drafts go into cooldown.
        """
        record = self.record(drafter, kind, n)
        if record.fresh:
            record.fresh = False
            return
        record.loss = max(0.0, record.loss + seconds - tokens * self.times.without_drafts(n) / n)
        if record.loss > LOSS * seconds:
            self._give_up(record, n)

    def _give_up(self, record: Record, n: int, least: int = 0) -> None:
        """Begin a cooldown, no longer than needed to make the loss a small share of the time."""
        most = 1e9
        if record.in_a_row:  # with the time to build the graph without drafts, which is needed next
            most = (record.loss + self.times.building.value) / (BUDGET * self.times.of(n, 1))
        record.cooldown.begin(self.now, most, least)
        record.in_a_row, record.loss, record.idle = 0, 0.0, 0

    def record(self, drafter: Drafter, kind: str, n: int) -> Record:
        """The record of a kind of drafts for the group of `n` sequences."""
        key = kind, group_of(n)
        if (record := self._records.get(key)) is None:
            memory = MEMORY * min(key[1], CROWD)
            record = self._records[key] = Record(Acceptance(drafter.kinds[kind], memory))
        return record

    def _cooldown(self, drafter: Drafter, kind: str, n: int) -> int:
        return self.record(drafter, kind, n).cooldown.left(self.now)
