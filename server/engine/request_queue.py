"""The queue of requests without a slot, by tenant; `scheduling_policy.py` says whose turn it is."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from functools import partial
from heapq import nsmallest
from typing import TYPE_CHECKING

from .scheduling_policy import AGEING, Policy, Tenant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Sequence as ListLike

    from .scheduling_policy import SchedulingPolicy
    from .sequence import Sequence

LOOK_AGAIN = 8
"""Steps after which one to preempt is looked for again: tenants have had something by then."""
MOST_HEADS = 16
"""Tenants for which one that makes room is looked for at once: with thousands that would take long."""


class RequestQueue:
    """Sequences that wait for a slot, in the order in which `policy` admits them.

    `running`, those that have one in order of admission, is the scheduler's own list, which is only read.
    """

    def __init__(self, policy: SchedulingPolicy, running: ListLike[Sequence]) -> None:
        self.policy = Policy(policy, running)
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
        return {tier: (waiting[tier], cost) for tier, cost in self.policy.served.items()}

    def crowded(self, sequence: Sequence) -> bool:
        """Whether a new request comes behind others of its tenant, which is not everybody's."""
        return self.policy.apart and self.policy.name(sequence) in self._backlogged

    def add(self, sequence: Sequence) -> None:
        """Queue one that is new, or that was preempted, which keeps its place by arrival."""
        if sequence.arrival:
            self.policy.charge(sequence)
        else:
            self._arrivals += 1
            sequence.arrival = self._arrivals
            self.policy.arrived(sequence)
        tenant = self.policy.of(sequence)
        self._backlogged[self.policy.name(sequence)] = tenant
        insort(tenant.waiting, (self.policy.rank(sequence), sequence.arrival, sequence))
        self._changed = True

    def peek(self) -> Sequence:
        """Who is next to get a free slot."""
        self.policy.settle()
        tiers = (self._admissions + 1) % AGEING != 0
        return min(self._backlogged.values(), key=partial(Tenant.turn, tiers=tiers)).first()

    def pop(self, sequence: Sequence, slot: int) -> None:
        """It is admitted."""
        tenant, rank = self._take(sequence), self.policy.rank(sequence)
        sequence.slot = slot
        sequence.aged = bool(tenant.waiting) and tenant.waiting[0][0] < rank
        sequence.aged |= any(other.waiting[0][0][:2] < rank[:2] for other in self._backlogged.values())
        tenant.admitted += 1
        self._admissions += 1
        self.policy.charge(sequence)

    def discard(self, sequence: Sequence) -> None:
        """It is over, wherever it was."""
        if not sequence.arrival:  # it never came
            return
        if sequence.slot is None:
            self._take(sequence)
        self.policy.left(sequence)
        sequence.arrival = 0
        self._changed = True

    @property
    def contended(self) -> bool:
        """Whether there may be somebody to preempt."""
        return self.policy.ranked and (self._changed or self.steps >= self._due)

    def preemption(
        self, can_go: Callable[[Sequence], bool], head: Sequence | None = None
    ) -> tuple[Sequence, Sequence] | None:
        """Who waits, or `head`, and who runs and has to make room for it, of those that `can_go`."""
        if not self.contended:
            return None
        self._changed, self._due = False, self.steps + LOOK_AGAIN
        self.policy.settle()
        if head is not None:
            return self.policy.preemption([head], can_go)
        tenants = nsmallest(MOST_HEADS, self._backlogged.values(), key=Tenant.turn)
        return self.policy.preemption((tenant.waiting[0][2] for tenant in tenants), can_go)

    def _take(self, sequence: Sequence) -> Tenant:
        tenant = self.policy.of(sequence)
        tenant.waiting = [entry for entry in tenant.waiting if entry[2] is not sequence]
        if not tenant.waiting:
            del self._backlogged[self.policy.name(sequence)]
            self.policy.last = tenant
        return tenant
