"""Chooses how many tokens to draft: as many as are expected to give the most tokens a second, or none.

The depth follows from acceptance and cost as in Leviathan et al. 2023, section 3.5. Acceptance is each
request's own (`acceptance.py`); the times are those of this load on this machine (`times.py`). All requests
that draft have the same depth, since another number of rows is another graph; those whose drafts do not pay
have none. What drafts may lose is bounded (`budget.py`), whatever the estimates say. test_loads.py compares
the choices with the best fixed depths on simulated cards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .acceptance import Acceptance
from .budget import Budget
from .times import CACHED, Mean, StepTimes, group_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from .base import Drafter

DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 255)
"""Depths that are considered, besides the longest."""

MARGIN = 1.02
"""Drafts must be expected to give this many times the tokens a second of plain decoding, and another plan
this many times those of the last one."""

STAY = 16
"""Steps over which the time to change to another graph is spread, or fewer if it changes more often."""

REPLAN = 4
"""Steps for which a plan for several requests stays, since planning takes time while the device waits."""

UNTRIED = 4
"""Longest draft for a request of which nothing is known, if making it takes time."""

DELAYED = 1.5
"""How many times as long as expected a step may take by its drafts' fault."""

JUDGED = 4
"""No rest begins if no draft may have as many tokens: shorter limits come from the end of an answer."""

NEVER, AGAIN = 4096, 64
"""Steps until the next draft at a load where none can pay; that is worked out again after AGAIN steps."""


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
    seconds: float = 0.0
    """Of drafts and verification, by the table of times."""

    @property
    def depth(self) -> int:
        """Tokens of the longest draft."""
        return max(self.lengths)


@dataclass(slots=True)
class Step:
    """A decode step that may verify drafts: pending tokens of each sequence, and limits.

    `rewinds` is as in `StateStore`; `shape` is the sequences and rows of the last step.
    """

    pending: list[int]
    room: int
    most_rows: int
    owners: list[Hashable]
    """The requests, each of which is judged by its own results."""
    rewinds: int = 0
    shape: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class Load:
    """What is remembered between the steps of one load."""

    step: Step
    plan: Plan | None
    until: int
    """Step in which it is planned anew."""


class Policy:
    """Chooses draft lengths. With `always` they are the longest, at any cost: for tests that need many drafts
    of any quality."""

    def __init__(self, times: StepTimes, *, always: bool = False) -> None:
        self.times, self.always = times, always
        self.now = 0
        """Steps so far."""
        self.rollback = Mean()
        """Seconds of a checkpoint and the rollback to it, for drafts longer than `Step.rewinds`."""
        self.changes = Mean(1 / STAY, 1)
        """The share of rounds that have another graph than the step before."""
        self._budgets: dict[tuple[str, int], Budget] = {}
        """By kind and group of sequences."""
        self._own: dict[Hashable, dict[str, Acceptance]] = {}
        """Results of requests, by kind."""
        self._last: Load | None = None
        self._pays: dict[tuple[str, int], tuple[int, bool]] = {}

    # --- when to ask a drafter -----------------------------------------------------------------------------

    def allowed(self, drafter: Drafter, n: int) -> set[str]:
        """The kinds of a drafter that may be drafted for `n` sequences."""
        return {kind for kind in drafter.kinds if not self._wait(drafter, kind, n)}

    def cooldown(self, drafter: Drafter, n: int) -> int:
        """Steps until the first of its kinds may be drafted."""
        return min(self._wait(drafter, kind, n) for kind in drafter.kinds)

    def _wait(self, drafter: Drafter, kind: str, n: int) -> int:
        if self.always:
            return 0
        if not (drafter.instant or self._can_pay(drafter, kind, n)):
            return NEVER
        return self.budget(kind, n).wait(self.now)

    def _can_pay(self, drafter: Drafter, kind: str, n: int) -> bool:
        """Whether drafts as good as is assumed pay for `n` sequences."""
        worked_out, pays = self._pays.get((kind, n), (-AGAIN, False))
        if self.now - worked_out >= AGAIN:
            option = Option(drafter, [kind] * n, [drafter.depth] * n)
            step = Step([1] * n, n * drafter.depth, n * (drafter.depth + 1), [None] * n, drafter.depth)
            known: list[Acceptance | None] = [Acceptance(drafter.kinds[kind])] * n
            pays = self._of_option(option, known, step)[1] > MARGIN * n / self.times.plain(n)
            self._pays[kind, n] = self.now, pays
        return pays

    def budget(self, kind: str, n: int) -> Budget:
        """What drafts of a kind may cost beside about `n` sequences."""
        key = kind, group_of(n)
        if key not in self._budgets:
            self._budgets[key] = Budget()
        return self._budgets[key]

    def forget(self, owner: Hashable) -> None:
        """Drop the results of a request that ended."""
        self._own.pop(owner, None)

    def request_begins(self) -> None:
        """End rests for a new request, whose drafts may pay."""
        for budget in self._budgets.values():
            budget.wake(self.now)

    # --- choosing ------------------------------------------------------------------------------------------

    def choose(self, options: Sequence[Option], step: Step) -> Plan | None:
        """The best plan for a step; None if none beats plain decoding."""
        if self.always:
            return _longest(options, step)
        if (load := self._last) is not None and self._holds(load, options, step):
            return load.plan
        plan = self._best(options, step)
        stays = load is not None and load.plan is not None
        self._last = Load(step, plan, self.now + (REPLAN if stays else 0))
        if plan is None and max(step.pending) == 1:
            for option in options:
                if max(option.limits) >= min(JUDGED, option.drafter.depth):
                    for kind in {*option.kinds} - {""}:
                        self.budget(kind, len(step.pending)).rest(self.now)
        return plan

    def _holds(self, load: Load, options: Sequence[Option], step: Step) -> bool:
        """Whether the last plan is as good in this step as it was."""
        if (plan := load.plan) is None or self.now >= load.until:
            return False
        option = next((one for one in options if one.drafter is plan.drafter), None)
        return (
            option is not None
            and not option.drafter.instant
            and load.step.owners == step.owners
            and load.step.pending == step.pending
            and sum(plan.lengths) <= min(step.room, step.most_rows - sum(step.pending))
            and all(
                length <= limit and (kind or not length)
                for length, limit, kind in zip(plan.lengths, option.limits, option.kinds, strict=True)
            )
        )

    def _best(self, options: Sequence[Option], step: Step) -> Plan | None:
        n = len(step.pending)
        plain = self.times.plain(n)
        if max(step.pending) > 1:
            plain += self.times.passes(step.pending) - self.times.passes([1] * n)
        drafts = self._last is not None and self._last.plan is not None
        best, best_rate = None, n / plain * (1.0 if drafts else MARGIN)
        for option in options:
            known = [self._acceptance(*pair, option) for pair in zip(step.owners, option.kinds, strict=True)]
            plan, rate = self._of_option(option, known, step)
            if rate > best_rate:
                best, best_rate = plan, rate
        return best

    def _acceptance(self, owner: Hashable, kind: str, option: Option) -> Acceptance | None:
        """What is known of a request's drafts of a kind."""
        if not kind:
            return None
        own = self._own.get(owner, {}).get(kind)
        return own.at(self.now) if own is not None else Acceptance(option.drafter.kinds[kind])

    def _of_option(
        self, option: Option, known: Sequence[Acceptance | None], step: Step
    ) -> tuple[Plan | None, float]:
        """The best plan with an option, and its tokens a second. For each depth those draft whose drafts give
        the most, as many as pay."""
        drafter, times, n, before = option.drafter, self.times, len(known), sum(step.pending)
        limits = np.array(
            [
                0 if one is None else min(limit, drafter.depth if one.tried or drafter.instant else UNTRIED)
                for limit, one in zip(option.limits, known, strict=True)
            ]
        )
        room = min(step.room, step.most_rows - before)
        if (deepest := int(min(limits.max(), room))) <= 0:
            return None, 0.0
        same = (step.shape[1] - before) // n if step.shape[0] == n else 0  # the depth that keeps the graph
        depths = np.array([*sorted({*(d for d in (*DEPTHS, same) if 0 < d < deepest), deepest})])[:, None]
        right = np.array([[0.0] * deepest if one is None else one.right(deepest) for one in known])
        expected = np.cumsum(np.pad(right, ((0, 0), (1, 0))), axis=1)  # [n, tokens of a draft]
        lengths = np.minimum(limits, depths)  # [depths, n]
        pending = np.array(step.pending)
        if not times.ragged:  # as many rows for each sequence, since another number is another pass
            lengths = pending.min() + depths - pending
            lengths = np.where((lengths > 0) & (lengths <= limits), lengths, 0)
        gains = expected[np.arange(n), lengths]
        order = np.argsort(-gains, axis=1, kind="stable")
        drafted = np.cumsum(np.take_along_axis(lengths, order, axis=1), axis=1)
        costs = [drafter.cost(int(np.count_nonzero(limits)), int(depth)) for [depth] in depths]
        seconds = np.array(costs)[:, None] + times.totals(n)[np.minimum(before + drafted, CACHED)]
        fits = (drafted > 0) & (drafted <= room)
        if not times.ragged:
            passes = [times.passes([*pending + row]) for row in lengths]
            seconds[:] = np.array(costs)[:, None] + np.array(passes)[:, None]
            fits[:, :-1] = False
        factors = [times.factor(n, drafter.name, int(depth)) for [depth] in depths]
        spent = np.array(factors)[:, None] * seconds
        changes = (before + drafted != step.shape[1]) | (n != step.shape[0])
        spent += changes * times.known.change * (2 if drafter.instant else max(1 / STAY, self.changes.value))
        if deepest > step.rewinds:  # after a wrong draft accepted tokens are computed again
            each = (times.passes([*pending + deepest]) - times.passes([*pending])) / (n * deepest)
            wrong = 1 - np.pad(right, ((0, 0), (1, 0)), constant_values=1)[np.arange(n), lengths]
            again = np.take_along_axis(wrong * each * (pending + gains), order, axis=1)
            spent += (depths > step.rewinds) * (self.rollback.value + np.cumsum(again, axis=1))
        rates = (n + np.cumsum(np.take_along_axis(gains, order, axis=1), axis=1)) / spent
        rates = fits * rates * np.where(changes, 1, MARGIN)
        at, count = np.unravel_index(np.argmax(rates), rates.shape)
        chosen = np.zeros(n, np.int64)
        chosen[order[at, : count + 1]] = lengths[at, order[at, : count + 1]]
        return Plan(drafter, chosen.tolist(), float(seconds[at, count])), float(rates[at, count])

    # --- learning ------------------------------------------------------------------------------------------

    def verified(self, drafter: Drafter, kind: str, owner: Hashable, drafted: int, right: int) -> None:
        """Record a verified draft of a request, of which `right` tokens were accepted."""
        own = self._own.setdefault(owner, {})
        if kind not in own:
            own[kind] = Acceptance(drafter.kinds[kind])
        own[kind].add(drafted, right, self.now)

    def spent(self, kind: str, n: int, tokens: int, seconds: float, plan: Plan | None = None) -> None:
        """Record a step with drafts of a kind, or one that catches up after them, which has no plan. It gave
        `n` sequences `tokens`. `seconds` is all its time since the step before was done; what other work
        seems to have delayed counts in part."""
        if plan is not None:
            expected = plan.seconds * self.times.factor(n, plan.drafter.name, plan.depth)
            seconds = min(seconds, DELAYED * (expected + self.times.known.change + self.rollback.value))
        self.budget(kind, n).spend(self.now, seconds / self.times.plain(n) - tokens / n)

    def prepared(self, kind: str, n: int, seconds: float) -> None:
        """Record a plain step that was slower because it prepared the next draft of a kind."""
        self.budget(kind, n).owe(min(DELAYED, seconds / self.times.plain(n)) - 1)

    def __str__(self) -> str:
        known = self.times.known.table.items()
        table = {n: {row: round(1e3 * each, 2) for row, each in rows.items()} for n, rows in known}
        budgets = ", ".join(f"{n} at once {kind} {one}" for (kind, n), one in sorted(self._budgets.items()))
        return (
            f"ms by sequences and rows of each {table}, a change {1e3 * self.times.known.change:.2f}; "
            f"times of the table: {self.times}; plain steps left: {budgets}"
        )


def _longest(options: Sequence[Option], step: Step) -> Plan | None:
    """The longest drafts of the first drafter that has any. If room is short, all are limited equally."""
    free = min(step.room, step.most_rows - sum(step.pending))
    each = max(0, free // len(step.pending))
    for option in options:
        pairs = zip(option.kinds, option.limits, strict=True)
        lengths = [min(limit, each) if kind else 0 for kind, limit in pairs]
        if any(lengths):
            return Plan(option.drafter, lengths)
    return None
