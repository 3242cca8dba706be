"""Limits how many requests each tenant may have open, and estimates when a refused one should retry."""

import math
from collections import Counter, defaultdict, deque
from time import perf_counter

from .errors import QueueFull

REMEMBERED = 32
"""How many of the last requests' ends are kept, to measure the rate at which requests end."""
LONGEST_RETRY_S = 60


class AdmissionControl:
    """Places for running and waiting requests: `parallel` plus `max_queue` for all tenants together.

    If all places are taken, only tenants that hold at least an equal part of them are refused. The others may
    fill up to twice as many places. Not thread-safe.
    """

    def __init__(self, parallel: int, max_queue: int) -> None:
        self._most = parallel + max_queue
        self._full = f"{parallel} requests run and {max_queue} wait already"
        self._open = Counter[str]()
        self._total = 0
        self._ends: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._all_ends: deque[float] = deque(maxlen=REMEMBERED)

    def take(self, tenant: str) -> None:
        """Take a place for this tenant. Raises QueueFull as `check` does."""
        self.check(tenant)
        self._open[tenant] += 1
        self._total += 1

    def check(self, tenant: str) -> None:
        """Raises QueueFull, with an estimate of when to retry, if there is no place for this tenant."""
        own = self._open[tenant]
        part = max(1, self._most // (len(+self._open) + (not own)))
        if self._total >= self._most and (own >= part or self._total >= 2 * self._most):
            too_many = max(1, min(own - part, self._total - self._most) + 1)
            whose = f", {own} of them of this API key or address" if own < self._total else ""
            raise QueueFull(f"{self._full}{whose}; try again later", self._seconds(tenant, too_many))

    def leave(self, tenant: str) -> None:
        """A request of this tenant has ended."""
        now = perf_counter()
        self._ends[tenant].append(now)
        self._all_ends.append(now)
        self._total -= 1
        self._open[tenant] -= 1
        if not self._open[tenant]:
            del self._open[tenant], self._ends[tenant]

    def _seconds(self, tenant: str, count: int) -> int:
        """Estimated seconds until `count` of the tenant's requests have ended, by the rate at which its last
        ones ended; 1 if unknown."""
        ends = self._ends.get(tenant) or self._all_ends
        if len(ends) < 2:
            return 1
        each = (perf_counter() - ends[0]) / len(ends)
        return min(max(1, math.ceil(count * each)), LONGEST_RETRY_S)
