"""The scheduling policies: which request is next, which one is preempted, and how much each tenant has used.

- `fcfs`: first come, first served.
- `priority`: by service tier, then by `priority`, the lower number first, then in order, as in vLLM.
- `fair`: within the best waiting tier, the tenant that has used the least is next; within a tenant as
  `priority`. With one tenant and no priorities this is `fcfs`.

Ageing: every `AGEING`th admission to a free slot ignores tiers, and every `AGEING`th of a tenant takes its
longest waiting request, so that better requests cannot starve the others.

A tenant's use is a virtual token counter (VTC; Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024), divided by its share: computed prompt tokens, and output tokens weighted by how much longer a step
takes for one. When an idle tenant sends a request, its counter restarts at the lowest counter of the waiting
tenants, so it has neither credit nor debt. It restarts no lower than an average tenant's (the virtual time of
weighted fair queueing), so newcomers cannot starve others.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .request import TIERS, Request

SchedulingPolicy = Literal["fcfs", "priority", "fair"]
AGEING = 8
WRITTEN, MOST_WRITTEN = 2.0, 100.0
"""Cost of an output token in prompt tokens (VTC's weight): before it is measured, and at most."""

Rank = tuple[bool, int, int]
"""Suspects come first, then the better tier, then the lower priority."""


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant of the server: an API key or an address."""

    counter: float = 0.0
    share: float = 1.0
    requests: int = 0
    """Waiting and running ones."""
    admitted: int = 0
    waiting: list[tuple[Rank, int, Request]] = field(default_factory=list)
    """By rank, then by arrival."""

    def turn(self, *, tiers: bool = True) -> tuple[bool, int, float, int]:
        """Sort key of tenants: the lowest is next."""
        (rest, tier, _), arrival, _ = self.waiting[0]
        return rest, tier if tiers else 0, self.counter, arrival

    def first(self) -> Request:
        """The next of its waiting requests."""
        if (self.admitted + 1) % AGEING or self.waiting[0][2].quarantined:
            return self.waiting[0][2]
        return min(self.waiting, key=lambda entry: entry[1])[2]


class Policy:
    """Order and counters. It only reads `running`, the sequences with a slot in order of admission."""

    def __init__(self, policy: SchedulingPolicy, running: Sequence[Request]) -> None:
        self.ranked, self.apart = policy != "fcfs", policy == "fair"
        self.served = dict.fromkeys(TIERS, 0.0)
        """Cost of each tier's requests so far, in prompt tokens."""
        self._running = running
        self._tenants: dict[str, Tenant] = {}
        self._active, self._shares = 0, 0.0
        """Number of tenants with requests, and the sum of their shares."""
        self._average = 0.0
        """The counter of a tenant that was never idle and always got its share."""
        self.last: Tenant | None = None
        """The tenant that most recently had its last waiting request admitted or removed."""
        self._written = WRITTEN

    def name(self, sequence: Request) -> str:
        return sequence.scheduling.tenant if self.apart else ""

    def of(self, sequence: Request) -> Tenant:
        """The tenant of a request that waits or runs."""
        return self._tenants[self.name(sequence)]

    def rank(self, sequence: Request) -> Rank:
        asked = sequence.scheduling
        ranks = (TIERS.index(asked.service_tier), asked.priority) if self.ranked else (0, 0)
        return not sequence.quarantined, *ranks

    # --- preemption and the order of prefills --------------------------------------------------------------

    def preemption(
        self, heads: Iterable[Request], can_go: Callable[[Request], bool]
    ) -> tuple[Request, Request] | None:
        """The first of the waiting `heads` that may preempt a running sequence, and that sequence; or None.

        The victim must pass `can_go`, and one of these must hold: it has a worse tier; it is of the same
        tenant and has a worse priority; its tenant has used no less, and without it would still run at least
        as many requests relative to its share. Of several victims the worst rank goes first, then the tenant
        that runs most relative to its share, then the youngest.
        """
        runs = Counter(map(self.name, self._running))
        able = sorted(
            (self.rank(one), runs[self.name(one)] / one.scheduling.share, index)
            for index, one in enumerate(self._running)
            if not one.quarantined and not one.aged
        )
        for head in heads:
            rank, name, tenant = self.rank(head), self.name(head), self.of(head)
            after = (runs[name] + 1) / head.scheduling.share
            for theirs, most, index in reversed(able) if rank[0] else ():
                other = self._running[index]
                if self.name(other) == name or theirs[1] != rank[1]:
                    gives = theirs > rank
                else:
                    gives = most - 1 / other.scheduling.share >= after
                    gives = gives and self.of(other).counter >= tenant.counter
                if gives and can_go(other):
                    return head, other
        return None

    def youngest(self) -> Request:
        """The sequence to preempt when others need cells: that of the worst rank, then of the tenant that has
        used most, then the last admitted. It is the first admitted only if no other runs, so that one always
        finishes."""
        self.settle()
        claims = ((self.rank(one), self.of(one).counter, i) for i, one in enumerate(self._running))
        return self._running[max([*claims][1:], default=(0, 0, 0))[2]]

    def nearest(self, sequences: Iterable[Request]) -> list[Request]:
        """Sort by the tokens left before the first output token. The nearest sequence of each tenant comes
        before the second of any tenant."""
        before = Counter[str]()
        turns: dict[Request, tuple[int, float, int]] = {}
        for sequence in sorted(sequences, key=lambda one: one.pending):
            name = self.name(sequence)
            turns[sequence] = before[name], self.of(sequence).counter, sequence.pending
            before[name] += 1
        return sorted(turns, key=turns.__getitem__)

    # --- each tenant's counter -----------------------------------------------------------------------------

    def arrived(self, sequence: Request) -> None:
        """A new request arrived: count it and set its tenant's counter."""
        name = self.name(sequence)
        if not self._active:  # no tenant has requests: all counters start again
            self._tenants, self._shares, self._average, self.last = {}, 0.0, 0.0, None
        tenant = self._tenants.get(name)
        if tenant is None or not tenant.waiting:
            self.settle()
            waiting = (one.counter for one in self._tenants.values() if one.waiting)
            floor = max(self._average, min(waiting, default=self.last.counter if self.last else 0.0))
            if len(self._tenants) > 2 * self._active:
                tenants = self._tenants.items()
                self._tenants = {key: one for key, one in tenants if one.requests or one.counter > floor}
            tenant = self._tenants.setdefault(name, Tenant())
            tenant.counter = max(tenant.counter, floor)
        if not tenant.requests:
            self._active += 1
            tenant.share = sequence.scheduling.share
            self._shares += tenant.share
        tenant.requests += 1

    def left(self, sequence: Request) -> None:
        """A request is over: charge its tenant for the rest."""
        tenant = self.of(sequence)
        tenant.requests -= 1
        if not tenant.requests:  # before the sum of shares changes
            self.settle()
        self.charge(sequence)
        self._count(sequence)
        if not tenant.requests:
            self._active -= 1
            self._shares -= tenant.share

    def settle(self) -> None:
        """Charge running sequences for their work since the last charge, if the policy counts by tenant."""
        for sequence in self._running if self.apart else ():
            self.charge(sequence)

    def charge(self, sequence: Request) -> None:
        """Charge its tenant for its work since the last charge. A prompt counts in full from admission on."""
        prompt, written = sequence.charged
        if sequence.slot is not None or prompt:
            sequence.charged = sequence.prompt_length - (sequence.reused or 0), sequence.generated
        cost = sequence.charged[0] - prompt + self._written * (sequence.charged[1] - written)
        tenant = self.of(sequence)
        tenant.counter += cost / tenant.share
        # due to rounding, the sum may be below a part
        self._average += cost / max(self._shares, tenant.share)
        sequence.uncounted += cost
        if sequence.reused is not None:  # until then, a part may turn out to be in the prefix cache
            self._count(sequence)

    def _count(self, sequence: Request) -> None:
        self.served[sequence.scheduling.service_tier] += sequence.uncounted
        sequence.uncounted = 0.0

    def decoded(self, tokens: int, seconds: float, each: float) -> None:
        """A step of `seconds` wrote `tokens`; `each`: seconds that a prompt token takes, 0 if unknown."""
        if each:
            self._written += (min(max(seconds / tokens / each, 1.0), MOST_WRITTEN) - self._written) / 64
