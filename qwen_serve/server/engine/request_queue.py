"""The queue of requests without a slot, by tenant; `scheduling_policy.py` decides which one is next."""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from heapq import nsmallest

from .request import Request
from .scheduling_policy import AGEING, Policy, SchedulingPolicy, Tenant

LOOK_AGAIN = 8
"""Steps after which a preemption is considered again, since tenants' counters have changed by then."""
MOST_HEADS = 16
"""Maximum tenants for which a preemption is considered at once, since thousands would take long."""


class RequestQueue:
    """Sequences that wait for a slot, in the order in which `policy` admits them.

    `running` is the scheduler's own list of sequences with a slot, in order of admission; it is only read.
    """

    def __init__(self, policy: SchedulingPolicy, running: Sequence[Request]) -> None:
        self.policy = Policy(policy, running)
        self._backlogged: dict[str, Tenant] = {}
        """Tenants with waiting requests."""
        self._arrivals = self._admissions = 0
        self.steps = 0
        """Steps computed so far; the scheduler counts them."""
        self._changed, self._due = False, 0
        """Whether a request arrived or left since preemption was last considered, and the step at which it is
        considered again in any case."""

    def __bool__(self) -> bool:
        return bool(self._backlogged)

    def __len__(self) -> int:
        return sum(len(tenant.waiting) for tenant in self._backlogged.values())

    def __iter__(self) -> Iterator[Request]:
        return (entry[2] for tenant in list(self._backlogged.values()) for entry in list(tenant.waiting))

    def tiers(self) -> dict[str, tuple[int, float]]:
        """By service tier: waiting requests, and the cost of all requests in prompt tokens; any thread."""
        waiting = Counter(sequence.scheduling.service_tier for sequence in self)
        return {tier: (waiting[tier], cost) for tier, cost in self.policy.served.items()}

    def crowded(self, sequence: Request) -> bool:
        """Whether a new request waits behind others of its tenant, if tenants are distinguished."""
        return self.policy.apart and self.policy.name(sequence) in self._backlogged

    def add(self, sequence: Request) -> None:
        """Queue a new sequence, or a preempted one, which keeps its place by arrival."""
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

    def peek(self) -> Request:
        """The next sequence to get a free slot."""
        self.policy.settle()
        tiers = (self._admissions + 1) % AGEING != 0
        return min(self._backlogged.values(), key=partial(Tenant.turn, tiers=tiers)).first()

    def pop(self, sequence: Request, slot: int) -> None:
        """Remove a sequence that is admitted to `slot`."""
        tenant, rank = self._take(sequence), self.policy.rank(sequence)
        sequence.slot = slot
        sequence.aged = bool(tenant.waiting) and tenant.waiting[0][0] < rank
        sequence.aged |= any(other.waiting[0][0][:2] < rank[:2] for other in self._backlogged.values())
        tenant.admitted += 1
        self._admissions += 1
        self.policy.charge(sequence)

    def discard(self, sequence: Request) -> None:
        """A sequence is over, waiting or running."""
        if not sequence.arrival:  # it was never queued
            return
        if sequence.slot is None:
            self._take(sequence)
        self.policy.left(sequence)
        sequence.arrival = 0
        self._changed = True

    @property
    def contended(self) -> bool:
        """Whether there may be a sequence to preempt."""
        return self.policy.ranked and (self._changed or self.steps >= self._due)

    def preemption(
        self, can_go: Callable[[Request], bool], head: Request | None = None
    ) -> tuple[Request, Request] | None:
        """A waiting sequence (`head` if given), and a running one that passes `can_go` and is preempted for
        it; None if there are none."""
        if not self.contended:
            return None
        self._changed, self._due = False, self.steps + LOOK_AGAIN
        self.policy.settle()
        if head is not None:
            return self.policy.preemption([head], can_go)
        tenants = nsmallest(MOST_HEADS, self._backlogged.values(), key=Tenant.turn)
        return self.policy.preemption((tenant.waiting[0][2] for tenant in tenants), can_go)

    def _take(self, sequence: Request) -> Tenant:
        tenant = self.policy.of(sequence)
        tenant.waiting = [entry for entry in tenant.waiting if entry[2] is not sequence]
        if not tenant.waiting:
            del self._backlogged[self.policy.name(sequence)]
            self.policy.last = tenant
        return tenant
