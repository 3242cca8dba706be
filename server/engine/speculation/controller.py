"""How many rows a step verifies: as many as give the most tokens a second, by what is known of this machine
and of the drafts so far; none where drafting does not pay.

An arm is a drafter and a number of rows; its worth is the expected tokens, from hits and tries by depth, over
the expected seconds: the pass, the draft, graphs to be built, and what a rollback has computed again. Depth
by acceptance and cost as in Leviathan et al. 2023, section 3.5, with both measured while it runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .times import Mean, StepTimes, group_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as ListLike

    from .base import Drafter

ROWS = (2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 20, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Rows of a sequence that are considered, beside those that there is a graph for and the most allowed."""

MARGIN = 1.02
"""Drafting must promise so many times what plain decoding gives."""

STAY = 16
"""Steps over which the time to change to another graph is spread, where its shape is to last."""

DEPTHS = 16
"""Tokens of a draft that are counted apart; those after them are taken for the last of these."""

MEMORY, FADE = 32, 0.03
"""Tries of a depth after which they count half, to follow a text that changes its character; and what fades
of the depths below with each draft that ends above them."""

ASSUMED_WEIGHT, REMEMBERED = 2, 2
"""Tries that an assumption counts for; and those that are left of what was learnt before a rest."""

STALE = 0.02
"""What fades of all that is known of a drafter with each step for which another one drafts: so it has another
go some fifty steps later, whatever became of its first drafts."""

HOPE = 0.95
"""Chance of each token with which one draft is tried after a rest where less could not pay: it tells."""

COOLDOWN_FIRST, COOLDOWN_GROWTH, COOLDOWN_LAST = 128, 4, 2048
"""Steps without drafts that do not pay: at first, how many times as many each time, and at most."""

TRIALS = 0.01
"""Share of the time that trials may cost, one with each request that begins: as soon as what the last one
lost is no more than that, the next request is reason enough for another. On a made-up H200, after 40 answers
of 128 tokens with a head that is never right or in three of ten, one that always is drafts again from the
first to fourth answer on, and did not within eight; where it stays bad that costs 0.3 to 0.7%."""

COOLDOWN_ALONE = 4
"""How many times as long a rest may be while no request begins: then a trial leaves a graph, and hidden rows
are to be kept for it before."""

PROVEN = 16
"""Steps in a row with drafts after which a trial has succeeded."""

DECAY = 0.95
"""What the result of a step counts for with each step after it."""

PATIENCE = 12
"""Steps after which drafts are judged by their results: the tokens must be worth the time that they took."""

JUDGED = 8
"""Tokens that a draft may at least have where its not paying is held against it: the end of an answer is
nobody's fault."""


class HitRates:
    """How often drafted tokens of one kind were right if those before them were, by depth."""

    __slots__ = ("_assumed", "_right", "_total", "_valid", "hits", "missed", "tries")

    def __init__(self, assumed: float) -> None:
        self._assumed = assumed
        self.hits: list[float] = []
        self.tries: list[float] = []
        self.missed = False
        """Something was wrong, since the last `forget`."""
        self._right: list[float] = []
        self._total: list[float] = []
        self._valid = False

    def add(self, drafted: int, accepted: int) -> None:
        """A draft of so many tokens was verified, the first `accepted` of which were right."""
        tested = min(accepted + 1, drafted, DEPTHS)
        self.missed |= accepted < drafted
        while len(self.tries) < tested:
            self.hits.append(0.0)
            self.tries.append(0.0)
        for depth in range(tested):
            self.hits[depth] += depth < accepted
            self.tries[depth] += 1
            if self.tries[depth] > MEMORY:
                self.hits[depth] /= 2
                self.tries[depth] /= 2
        for depth in range(tested, len(self.tries)):
            self.hits[depth] *= 1 - FADE
            self.tries[depth] *= 1 - FADE
        self._valid = False

    def forget(self) -> None:
        """Have what comes next count for more than all that was."""
        for depth, tries in enumerate(self.tries):
            share = min(1.0, REMEMBERED / max(1.0, tries))
            self.hits[depth] *= share
            self.tries[depth] *= share
        self.missed = self._valid = False

    def fade(self) -> None:
        """Another drafter had the step."""
        self.hits = [(1 - STALE) * hits for hits in self.hits]
        self.tries = [(1 - STALE) * tries for tries in self.tries]
        self._valid = False

    def expected(self, n: int) -> float:
        """Right tokens of a draft of `n`."""
        if n <= 0:
            return 0.0
        self._work_out()
        if n <= DEPTHS:
            return self._total[n - 1]
        last = min(0.9999, self._right[-1] / self._right[-2])  # from there on a geometric series
        return self._total[-1] + self._right[-1] * last * (1 - last ** (n - DEPTHS)) / (1 - last)

    def all_right(self, n: int) -> float:
        """The chance that `n` tokens are all right."""
        self._work_out()
        return self._right[min(n, DEPTHS) - 1]

    def _work_out(self) -> None:
        if self._valid:
            return
        chance, right, total = self._assumed, 1.0, 0.0
        self._right, self._total, self._valid = [], [], True
        for depth in range(DEPTHS):
            if depth < len(self.tries):  # what is not known of a depth, the one before makes up for
                hits, tries = self.hits[depth], self.tries[depth]
                chance = (hits + ASSUMED_WEIGHT * chance) / (tries + ASSUMED_WEIGHT)
            right *= chance
            total += right
            self._right.append(right)
            self._total.append(total)


class Backoff:
    """Steps that are let pass after something did not pay: more each time, until it does."""

    __slots__ = ("_early", "_first", "_last", "_next", "_until")

    def __init__(self, first: int, last: int = COOLDOWN_LAST) -> None:
        self._first, self._last = first, last
        self._next, self._until, self._early = first, 0, 0
        """What the next one takes; the step that ends this one, and that from which on it may be ended."""

    def left(self, now: int) -> int:
        """Steps from step `now` on until it is time to try."""
        return max(0, self._until - now)

    def begin(self, now: int, most: int = 10**9, least: int = 0) -> None:
        """It did not pay in step `now`; `most` steps are enough for it, and it takes `least`."""
        steps, self._next = max(least, min(self._next, most)), min(self._last, COOLDOWN_GROWTH * self._next)
        self._until, self._early = now + steps, now + steps // COOLDOWN_ALONE

    def retry_early(self, now: int) -> None:
        """There is a reason to try in step `now`, if a part of the steps is over."""
        if now >= self._early:
            self._until = min(self._until, now)

    @property
    def begun(self) -> bool:
        """Whether it has not paid since it last did."""
        return self._next > self._first

    def end(self) -> None:
        """It pays: the next steps let pass are as few as the first."""
        self._next, self._until = self._first, 0


@dataclass(slots=True)
class Trial:
    """One kind of drafts for about so many sequences."""

    cooldown: Backoff = field(default_factory=lambda: Backoff(COOLDOWN_FIRST))
    in_a_row: int = 0
    """Steps with such drafts since the last rest."""
    steps: int = 0
    seconds: float = 0.0
    plain: float = 0.0
    """What the tokens of the last steps would have taken without drafts."""
    fresh: bool = True
    """Nothing was drafted yet: the first time, kernels are loaded."""

    def give_up(self, now: int, most: int, least: int = 0) -> None:
        """It did not pay; rest for at most so many steps, and for `least` of them."""
        self.cooldown.begin(now, most, least)
        self.in_a_row = self.steps = 0
        self.seconds = self.plain = 0.0


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
    """A decode step that may verify drafts: what is pending of each sequence, and what the way back allows.

    `rewinds` and `keeps_graph` are those of `StateStore`; `shape` the sequences and rows of the last step.
    """

    pending: list[int]
    room: int
    most_rows: int
    rewinds: int = 0
    keeps_graph: int = 0
    shape: tuple[int, int] = (0, 0)


class Controller:
    """Chooses arms and learns from what they give. Kinds of drafts are judged apart, and so are crowds, by
    powers of two."""

    def __init__(self, times: StepTimes) -> None:
        self.times = times
        self.now = 0
        """Steps so far."""
        self._rates: dict[str, HitRates] = {}
        self._trials: dict[tuple[str, int], Trial] = {}
        self._plain: dict[int, Mean] = {}
        self._way_back = Mean()
        """Seconds that it takes to keep a way back and to go it, where that is not for nothing."""

    # --- choosing ------------------------------------------------------------------------------------------

    def allowed(self, drafter: Drafter, n: int) -> set[str]:
        """The kinds of a drafter that may be drafted for `n` sequences."""
        return {kind for kind in drafter.kinds if not self._trial(kind, n).cooldown.left(self.now)}

    def cooldown_left(self, drafter: Drafter, n: int) -> int:
        """Steps until the first of its kinds may be drafted."""
        return min(self._trial(kind, n).cooldown.left(self.now) for kind in drafter.kinds)

    def choose(self, options: ListLike[Option], step: Step) -> Plan | None:
        """The best plan for a step; None where nothing beats plain decoding."""
        n = len(step.pending)
        hopeful = [option for option in options if self._hopes(option, n)]
        plan = self._best(options, step)
        if plan is None and n == 1 and hopeful:
            plan = self._best(hopeful, step, HOPE, max(2, step.rewinds))
        if plan is not None or max(step.pending) == 1:  # to catch up is no time to judge
            self._learn_verdict(options, plan, n)
        return plan

    def _hopes(self, option: Option, n: int) -> bool:
        """Whether something of it is on trial after a rest, and has not been wrong since."""
        hopes = False
        for kind in {kind for kind in option.kinds if kind}:
            trial, rates = self._trial(kind, n), self.rates(option.drafter, kind)
            if trial.cooldown.begun and not trial.in_a_row:
                rates.forget()
            hopes |= trial.cooldown.begun and not rates.missed
        return hopes

    def _best(
        self, options: ListLike[Option], step: Step, hope: float = 0.0, longest: int = 10**9
    ) -> Plan | None:
        """The best arm; with `hope`, of at most `longest` tokens each of which has that chance."""
        pending, n, times = step.pending, len(step.pending), self.times
        seconds = times.passes(pending) + self._change(pending, step)
        best, best_rate = None, MARGIN * n / seconds
        for option in options:
            limits = [min(limit, longest) for limit in option.limits]
            if hope:
                rates = [HitRates(hope) if kind else None for kind in option.kinds]
            else:
                rates = [self.rates(option.drafter, kind) if kind else None for kind in option.kinds]
            for rows in self._arms(option, limits, step):
                lengths = [
                    rows - own if rate is not None and 0 < rows - own <= limit else 0
                    for own, rate, limit in zip(pending, rates, limits, strict=True)
                ]
                total = sum(pending) + sum(lengths)
                if total == sum(pending) or total > step.most_rows or sum(lengths) > step.room:
                    continue
                right = sum(
                    rate.expected(length) for rate, length in zip(rates, lengths, strict=True) if rate
                )
                seconds = self._seconds(option.drafter, rates, lengths, step)
                if (n + right) / seconds > best_rate:
                    best, best_rate = Plan(option.drafter, lengths), (n + right) / seconds
        return best

    def _arms(self, option: Option, limits: list[int], step: Step) -> list[int]:
        ends = [
            own + min(limit, option.drafter.depth)
            for own, limit, kind in zip(step.pending, limits, option.kinds, strict=True)
            if kind
        ]
        if not ends:
            return []
        least, most = min(step.pending), max(ends)
        few = {rows for rows in ROWS if least < rows < most}
        if step.shape[0] == len(step.pending) and least < step.shape[1] < most:
            few.add(step.shape[1])
        return sorted({*few, *ends})

    def _seconds(
        self, drafter: Drafter, rates: list[HitRates | None], lengths: list[int], step: Step
    ) -> float:
        """What an arm takes, in this step and by its consequences."""
        pending, n, times = step.pending, len(step.pending), self.times
        rows = [own + length for own, length in zip(pending, lengths, strict=True)]
        seconds = times.passes(rows) + drafter.cost(sum(map(bool, lengths)), max(lengths))
        if max(lengths) > step.rewinds:
            seconds += self._way_back.value
        if max(lengths) > step.keeps_graph:
            seconds += times.leaving if drafter.instant or n > 1 else times.building.value
        else:
            seconds += self._change(rows, step, passing=drafter.instant)
        for own, rate, length in zip(pending, rates, lengths, strict=True):
            if rate is not None and length > step.rewinds:  # what was right comes again after a wrong draft
                right = rate.expected(length)
                again = times.of(1, n + own + round(right)) - times.of(1, n)
                seconds += (1 - rate.all_right(length)) * again
        return seconds

    def _change(self, rows: list[int], step: Step, *, passing: bool = False) -> float:
        """What it takes to come to the graph for so many rows.

        A drafter that is always there drafts again in the next step, and stays with a graph. It is left for a
        single step where a text repeats itself, now and then (`passing`), or something is pending.
        """
        if len(set(rows)) == 1 and (len(rows), rows[0]) == step.shape:
            return 0.0
        passing = passing or max(step.pending) > 1
        return self.times.leaving if passing else self.times.moving / STAY

    def _learn_verdict(self, options: ListLike[Option], plan: Plan | None, n: int) -> None:
        for option in options:
            for kind in {kind for kind in option.kinds if kind}:
                trial = self._trial(kind, n)
                longest = max(
                    limit for limit, own in zip(option.limits, option.kinds, strict=True) if own == kind
                )
                if plan is not None and option.drafter is plan.drafter:
                    trial.in_a_row += 1
                    if trial.in_a_row >= PROVEN:
                        trial.cooldown.end()
                elif plan is not None:
                    if not (plan.drafter.instant or option.drafter.instant):
                        self.rates(option.drafter, kind).fade()
                elif longest >= min(JUDGED, option.drafter.depth):
                    self._give_up(trial, n, untried=0 if n == 1 or option.drafter.instant else COOLDOWN_LAST)

    def _give_up(self, trial: Trial, n: int, *, untried: int = 0) -> None:
        """Rest: at least so many steps if that was to be seen without a draft."""
        most = COOLDOWN_LAST  # where even the hopeful do not pay
        if trial.steps:  # the way back to the graph without drafts is still to come
            lost = max(0.0, trial.seconds - trial.plain) + self.times.building.value
            most = max(COOLDOWN_FIRST, round(COOLDOWN_ALONE * lost / (TRIALS * self.times.of(n, 1))))
        trial.give_up(self.now, most, 0 if trial.steps else untried)

    def promises(self, drafter: Drafter, n: int, most_rows: int) -> bool:
        """Whether drafts of at most `most_rows` rows in all could pay for `n` sequences, by what is known
        before any is made. What could not rests from now on."""
        [kind] = drafter.kinds
        if n == 1:  # may be hoped for
            return True
        option = Option(drafter, [kind] * n, [drafter.depth] * n)
        if self._best([option], Step([1] * n, most_rows, most_rows)) is not None:
            return True
        self._give_up(self._trial(kind, n), n, untried=COOLDOWN_LAST)
        return False

    def on_trial(self, kinds: Iterable[str], n: int) -> bool:
        """Whether none of these has paid for about `n` sequences since it last did not."""
        return all(self._trial(kind, n).cooldown.begun for kind in kinds)

    def retry_early(self) -> None:
        """A request begins: what did not pay for others may pay for it."""
        for trial in self._trials.values():
            trial.cooldown.retry_early(self.now)

    # --- learning ------------------------------------------------------------------------------------------

    def rates(self, drafter: Drafter, kind: str) -> HitRates:
        """Hits and tries of a kind."""
        if (rates := self._rates.get(kind)) is None:
            rates = self._rates[kind] = HitRates(drafter.kinds[kind])
        return rates

    def add_way_back(self, seconds: float) -> None:
        """To keep a way back, and perhaps go it, took so long."""
        self._way_back.add(seconds)

    def add_plain(self, n: int, seconds: float) -> None:
        """A step without drafts, after another one, gave each of `n` sequences a token."""
        self._plain.setdefault(n, Mean()).add(seconds)

    def add(self, kind: str, n: int, tokens: int, seconds: float) -> None:
        """A step with drafts of a kind, or one that catches up after them, gave `n` sequences so many tokens.

        `seconds` is everything: the drafts, the step, the way back; but for what drafts that go on do not
        take again. Expectations rest on times of shapes that repeat; this is what has the last word.
        """
        trial = self._trial(kind, n)
        if trial.fresh:
            trial.fresh = False
            return
        mean = self._plain.get(n)
        plain = mean.value if mean is not None else self.times.of(n, 1)
        trial.seconds = DECAY * trial.seconds + seconds
        trial.plain = DECAY * trial.plain + tokens * plain / n
        trial.steps += 1
        if trial.steps >= PATIENCE and trial.plain < trial.seconds:
            self._give_up(trial, n)

    def _trial(self, kind: str, n: int) -> Trial:
        key = kind, group_of(n)
        if (trial := self._trials.get(key)) is None:
            trial = self._trials[key] = Trial()
        return trial


class Always(Controller):
    """Drafts as long as they can be, whatever they cost, and instant ones first: for tests."""

    def allowed(self, drafter: Drafter, n: int) -> set[str]:
        """All of them."""
        return set(drafter.kinds)

    def choose(self, options: ListLike[Option], step: Step) -> Plan | None:
        """The longest drafts of the first drafter that has any, shortened alike where there is no room."""
        free = min(step.room, step.most_rows - sum(step.pending))
        each = max(0, free // len(step.pending))
        for option in options:
            lengths = [
                min(limit, each) if kind else 0
                for kind, limit in zip(option.kinds, option.limits, strict=True)
            ]
            if any(lengths):
                return Plan(option.drafter, lengths)
        return None

    def add(self, kind: str, n: int, tokens: int, seconds: float) -> None:
        """Nothing is held against anybody."""
