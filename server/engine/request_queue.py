"""Who is admitted next, and who has to make room: the queue of requests without a slot, by policy.

- `fcfs`: first come, first served.
- `priority`: by service tier, then by `priority`, the lower number first, then in order, as in vLLM.
- `fair`: of the best tier that waits the tenant that has had least (`virtual_tokens.py`), within a tenant as
  `priority`. With one tenant and no priorities this is `fcfs`.

Ageing: every `AGEING`th admission to a free slot looks at no tier, and every `AGEING`th of a tenant takes the
one that waits longest, so that a stream of better ones keeps nobody waiting for ever.

Who waits takes the slot, or the cells, of one that runs where that one is of a worse tier, or of a worse
priority of the same tenant, or of a tenant that has had no less and would still run as many for its share.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from functools import partial
from heapq import nsmallest
from typing import TYPE_CHECKING, Literal

from .sequence import TIERS
from .virtual_tokens import VirtualTokenCounters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from collections.abc import Sequence as ListLike

    from .sequence import Sequence
    from .virtual_tokens import Rank, Tenant

SchedulingPolicy = Literal["fcfs", "priority", "fair"]

AGEING = 8
LOOK_AGAIN = 8
"""Steps after which one to preempt is looked for again: tenants have had something by then."""
MOST_HEADS = 16
"""Tenants for which one that makes room is looked for at once: with thousands that would take long."""


def _turn(tenant: Tenant, *, tiers: bool = True) -> tuple[bool, int, float, int]:
    """The least is next."""
    (rest, tier, _), arrival, _ = tenant.waiting[0]
    return rest, tier if tiers else 0, tenant.counter, arrival


class RequestQueue:
    """Sequences that wait for a slot, in the order in which `policy` admits them.

    `running`, those that have one in order of admission, is the scheduler's own list, which is only read.
    """

    def __init__(self, policy: SchedulingPolicy, running: ListLike[Sequence]) -> None:
        self.counters = VirtualTokenCounters(running, apart=policy == "fair")
        self._ranked = policy != "fcfs"
        self._running = running
        self._backlogged: dict[str, Tenant] = {}
        """Those of which somebody waits."""
        self._arrivals = self._admissions = 0
        self.steps = 0
        """That were computed so far; the scheduler counts them."""
        self._changed, self._due = False, 0
        """Whether somebody has come or gone since the last look for one to preempt, and the step at which the
        next is due all the same."""

    def __bool__(self) -> bool:
        return bool(self._backlogged)

    def __len__(self) -> int:
        return sum(len(tenant.waiting) for tenant in self._backlogged.values())

    def __iter__(self) -> Iterator[Sequence]:
        return (entry[2] for tenant in list(self._backlogged.values()) for entry in list(tenant.waiting))

    def tiers(self) -> dict[str, tuple[int, float]]:
        """By service tier how many wait, and what requests have cost, in prompt tokens; from any thread."""
        waiting = Counter(sequence.scheduling.service_tier for sequence in self)
        return {tier: (waiting[tier], cost) for tier, cost in self.counters.served.items()}

    def add(self, sequence: Sequence) -> None:
        """Queue one that is new, or that was preempted, which keeps its place by arrival."""
        if sequence.arrival:
            self.counters.charge(sequence)
        else:
            self._arrivals += 1
            sequence.arrival = self._arrivals
            self.counters.arrived(sequence)
        tenant = self.counters.of(sequence)
        self._backlogged[self.counters.name(sequence)] = tenant
        insort(tenant.waiting, (self._rank(sequence), sequence.arrival, sequence))
        self._changed = True

    def peek(self) -> Sequence:
        """Who is next to get a free slot."""
        self.counters.settle()
        tiers = (self._admissions + 1) % AGEING != 0
        tenant = min(self._backlogged.values(), key=partial(_turn, tiers=tiers))
        first = tenant.waiting[0][2]
        if (tenant.admitted + 1) % AGEING or first.suspect:
            return first
        return min(tenant.waiting, key=lambda entry: entry[1])[2]

    def pop(self, sequence: Sequence, slot: int) -> None:
        """It is admitted."""
        tenant, rank = self._take(sequence), self._rank(sequence)
        sequence.slot = slot
        sequence.aged = bool(tenant.waiting) and tenant.waiting[0][0] < rank
        sequence.aged |= any(other.waiting[0][0][:2] < rank[:2] for other in self._backlogged.values())
        tenant.admitted += 1
        self._admissions += 1
        self.counters.charge(sequence)

    def discard(self, sequence: Sequence) -> None:
        """It is over, wherever it was."""
        if not sequence.arrival:  # it never came
            return
        if sequence.slot is None:
            self._take(sequence)
        self.counters.left(sequence)
        sequence.arrival = 0
        self._changed = True

    @property
    def contended(self) -> bool:
        """Whether there may be somebody to preempt."""
        return self._ranked and (self._changed or self.steps >= self._due)

    def preemption(
        self, can_go: Callable[[Sequence], bool], head: Sequence | None = None
    ) -> tuple[Sequence, Sequence] | None:
        """Who waits, or `head`, and who runs and has to make room for it, of those that `can_go`: of the
        worst rank, then of the tenant that runs most for its share, the youngest."""
        if not self.contended:
            return None
        counters = self.counters
        self._changed, self._due = False, self.steps + LOOK_AGAIN
        counters.settle()
        runs = Counter(map(counters.name, self._running))
        able = sorted(
            (
                (self._rank(one), runs[counters.name(one)] / one.scheduling.share, index)
                for index, one in enumerate(self._running)
                if not one.suspect and not one.aged
            ),
            reverse=True,
        )
        tenants = nsmallest(MOST_HEADS, self._backlogged.values(), key=_turn) if head is None else ()
        for sequence in [head] if head is not None else [tenant.waiting[0][2] for tenant in tenants]:
            rank, name, tenant = self._rank(sequence), counters.name(sequence), counters.of(sequence)
            after = (runs[name] + 1) / sequence.scheduling.share
            for theirs, most, index in able if rank[0] else ():
                other = self._running[index]
                if counters.name(other) == name or theirs[1] != rank[1]:
                    gives = theirs > rank
                else:
                    gives = most - 1 / other.scheduling.share >= after
                    gives = gives and counters.of(other).counter >= tenant.counter
                if gives and can_go(other):
                    return sequence, other
        return None

    def youngest(self) -> Sequence:
        """Who makes room for the growth of others: of the worst rank, then of the tenant that has had most,
        the last that was admitted. Never the first, so that somebody always comes to an end."""
        self.counters.settle()

        def claim(index: int) -> tuple[Rank, float, int]:
            one = self._running[index]
            return self._rank(one), self.counters.of(one).counter, index

        return self._running[max(range(len(self._running))[1:] or [0], key=claim)]

    def nearest(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """By how near they are to their first token, each tenant's nearest before anybody's second."""
        before = Counter[str]()
        turns: dict[Sequence, tuple[int, float, int]] = {}
        for sequence in sorted(sequences, key=lambda one: one.pending):
            name = self.counters.name(sequence)
            turns[sequence] = before[name], self.counters.of(sequence).counter, sequence.pending
            before[name] += 1
        return sorted(turns, key=turns.__getitem__)

    def _rank(self, sequence: Sequence) -> Rank:
        asked = sequence.scheduling
        ranks = (TIERS.index(asked.service_tier), asked.priority) if self._ranked else (0, 0)
        return not sequence.suspect, *ranks

    def _take(self, sequence: Sequence) -> Tenant:
        tenant = self.counters.of(sequence)
        tenant.waiting = [entry for entry in tenant.waiting if entry[2] is not sequence]
        if not tenant.waiting:
            del self._backlogged[self.counters.name(sequence)]
            self.counters.last = tenant
        return tenant
