"""What each tenant has had: virtual token counters (VTC; Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .sequence import TIERS

if TYPE_CHECKING:
    from collections.abc import Sequence as ListLike

    from .sequence import Sequence

WRITTEN, MOST_WRITTEN = 2.0, 100.0
"""What a written token costs in prompt tokens before steps have shown it (VTC's weight), and at most."""

Rank = tuple[bool, int, int]
"""Suspects come first, then the better tier, then the lower priority."""


@dataclass(slots=True, eq=False)
class Tenant:
    """Whoever shares the server with others."""

    counter: float = 0.0
    """What it has had, in prompt tokens, divided by its share."""
    share: float = 1.0
    requests: int = 0
    """Those that wait or run."""
    admitted: int = 0
    waiting: list[tuple[Rank, int, Sequence]] = field(default_factory=list)
    """By rank, then by arrival."""


class VirtualTokenCounters:
    """A counter for each tenant, which grows by what its requests cost, divided by its share.

    A request costs the prompt tokens that were computed for it and those that it wrote, each of them as many
    as a step takes for it rather than for one of a prompt. Whoever has nobody waiting begins at the lowest
    counter of those who have: nothing is saved up, and who used what others left owes nothing for it. It
    begins no lower than an average tenant has got, either, the virtual time of weighted fair queueing: so a
    stream of newcomers keeps nobody waiting for ever. Charged is when somebody asks, and not in every step.

    `running` are the sequences that have a slot; with `apart` False all of them are one tenant's.
    """

    def __init__(self, running: ListLike[Sequence], *, apart: bool) -> None:
        self.served = dict.fromkeys(TIERS, 0.0)
        """What requests of each tier have cost so far, in prompt tokens."""
        self._running, self._apart = running, apart
        self._tenants: dict[str, Tenant] = {}
        self._active, self._shares = 0, 0.0
        """Tenants that have requests, and the sum of their shares."""
        self._average = 0.0
        """The counter of a tenant that was never idle and always got its share."""
        self.last: Tenant | None = None
        """Whose last waiting request left the queue last."""
        self._written = WRITTEN

    def name(self, sequence: Sequence) -> str:
        return sequence.scheduling.tenant if self._apart else ""

    def of(self, sequence: Sequence) -> Tenant:
        """The tenant of a request that waits or runs."""
        return self._tenants[self.name(sequence)]

    def crowded(self, sequence: Sequence) -> bool:
        """Whether a new request comes behind others of its tenant that wait."""
        tenant = self._tenants.get(self.name(sequence)) if self._apart else None
        return tenant is not None and bool(tenant.waiting)

    def arrived(self, sequence: Sequence) -> None:
        """A new request."""
        name = self.name(sequence)
        if not self._active:  # nobody is owed anything
            self._tenants, self._shares, self._average, self.last = {}, 0.0, 0.0, None
        tenant = self._tenants.get(name)
        if tenant is None or not tenant.waiting:
            self.settle()
            floor = max(self._average, self._lowest())
            if len(self._tenants) > 2 * self._active:
                owing = {
                    key: one for key, one in self._tenants.items() if one.requests or one.counter > floor
                }
                self._tenants = owing
            tenant = self._tenants.setdefault(name, Tenant())
            tenant.counter = max(tenant.counter, floor)
        if not tenant.requests:
            self._active += 1
            tenant.share = sequence.scheduling.share
            self._shares += tenant.share
        tenant.requests += 1

    def _lowest(self) -> float:
        """The counter of those who have somebody waiting; where nobody has, of who had last."""
        waiting = (one.counter for one in self._tenants.values() if one.waiting)
        return min(waiting, default=0.0 if self.last is None else self.last.counter)

    def left(self, sequence: Sequence) -> None:
        """A request is over."""
        self.settle()  # by the shares as they were
        self.charge(sequence)
        self._count(sequence)
        tenant = self.of(sequence)
        tenant.requests -= 1
        if not tenant.requests:
            self._active -= 1
            self._shares -= tenant.share

    def settle(self) -> None:
        """Charge for what was computed since the last time, unless all are one tenant's."""
        for sequence in self._running if self._apart else ():
            self.charge(sequence)

    def charge(self, sequence: Sequence) -> None:
        """For what it has cost since the last time. A prompt counts from the admission on."""
        prompt, written = sequence.charged
        if sequence.slot is not None or prompt:
            sequence.charged = sequence.prompt_length - (sequence.reused or 0), sequence.generated
        cost = sequence.charged[0] - prompt + self._written * (sequence.charged[1] - written)
        tenant = self.of(sequence)
        tenant.counter += cost / tenant.share
        self._average += cost / max(self._shares, tenant.share)  # rounded, a sum may be below a part
        sequence.uncounted += cost
        if sequence.reused is not None:  # before, a part may turn out to be in the prefix cache
            self._count(sequence)

    def _count(self, sequence: Sequence) -> None:
        self.served[sequence.scheduling.service_tier] += sequence.uncounted
        sequence.uncounted = 0.0

    def decoded(self, tokens: int, seconds: float, each: float) -> None:
        """A step wrote so many tokens; `each`: seconds that a prompt token takes, 0 if nobody knows."""
        if each:
            self._written += (min(max(seconds / tokens / each, 1.0), MOST_WRITTEN) - self._written) / 64
