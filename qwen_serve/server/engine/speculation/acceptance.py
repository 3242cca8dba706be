"""Acceptance of drafted tokens, by depth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

DEPTHS, MEMORY = 16, 32
"""Number of depths that are counted separately, since the first tokens are right more often. Number of tries
that are remembered for each depth, so that acceptance follows a text that changes."""

FADE = 0.03
"""Share of a depth's counts that is forgotten when a draft did not reach it or another drafter was used, so
that the depth is tried again."""

ASSUMED = 2
"""An assumption, and all results before a cooldown together, count as this many tries, since they may be
wrong."""


NOTHING = [0.0] * DEPTHS


def chances_of(
    own: Sequence[Acceptance | None], shared: Sequence[Acceptance | None], depths: int
) -> npt.NDArray[np.float64]:
    """Probabilities that all tokens up to each depth are right, [sequences, depths]: by each sequence's own
    results, and as far as these are few by the shared ones of its kind. 0 for a sequence with neither."""
    prior = np.array([NOTHING if one is None else one.chances() for one in shared])
    results = [(NOTHING, NOTHING) if one is None else one.counts for one in own]
    hits, tries = np.array(results).transpose(1, 0, 2)
    chances = (hits + ASSUMED * prior) / (tries + ASSUMED)
    if depths > DEPTHS:
        chances = np.hstack([chances, np.repeat(chances[:, -1:], depths - DEPTHS, axis=1)])
    return np.asarray(np.cumprod(chances[:, :depths], axis=1), np.float64)


class Acceptance:
    """How often drafted tokens of one kind were right, by depth, if all tokens before them were right."""

    __slots__ = ("_assumed", "_chances", "_hits", "_memory", "_right", "_total", "_tries")

    def __init__(self, assumed: float, memory: int = MEMORY) -> None:
        """`memory` is the number of tries that are remembered for each depth."""
        self._assumed, self._memory = assumed, memory
        self._hits = [0.0] * DEPTHS
        self._tries = [0.0] * DEPTHS
        self._right: list[float] = []
        self._total: list[float] = []
        self._chances: list[float] = []

    def add(self, drafted: int, accepted: int) -> None:
        """Record a verified draft of `drafted` tokens, of which the first `accepted` were right."""
        tested = min(accepted + 1, drafted, DEPTHS)
        self.fade(FADE * MEMORY / self._memory, tested)
        keep = 1 - 1 / self._memory
        for depth in range(tested):
            self._hits[depth] = keep * self._hits[depth] + (depth < accepted)
            self._tries[depth] = keep * self._tries[depth] + 1
        self._right.clear()

    def fade(self, share: float = FADE, start: int = 0) -> None:
        """Forget a share of the depths from `start` on, because they were not drafted."""
        keep = 1 - share
        self._hits[start:] = [keep * hits for hits in self._hits[start:]]
        self._tries[start:] = [keep * tries for tries in self._tries[start:]]
        self._right.clear()

    def retry(self) -> None:
        """Reduce the weight of all earlier results, so that the next ones count more."""
        shares = [min(1.0, ASSUMED / max(1.0, tries)) for tries in self._tries]
        self._hits = [share * hits for share, hits in zip(shares, self._hits, strict=True)]
        self._tries = [share * tries for share, tries in zip(shares, self._tries, strict=True)]
        self._right.clear()

    @property
    def counts(self) -> tuple[list[float], list[float]]:
        """Hits and tries, by depth."""
        return self._hits, self._tries

    def chances(self) -> list[float]:
        """The chance of a token at each of DEPTHS depths, if all before it are right."""
        self._work_out()
        return self._chances

    def all_right(self, n: int) -> float:
        """Probability that `n` tokens are all right."""
        self._work_out()
        return self._right[min(n, DEPTHS) - 1]

    def expected(self, n: int) -> float:
        """Expected right tokens of a draft of `n`."""
        if n <= 0:
            return 0.0
        self._work_out()
        if n <= DEPTHS:
            return self._total[n - 1]
        last = min(0.9999, self._right[-1] / self._right[-2])  # a geometric series beyond DEPTHS
        return self._total[-1] + self._right[-1] * last * (1 - last ** (n - DEPTHS)) / (1 - last)

    def _work_out(self) -> None:
        if self._right:
            return
        chance, right, total = self._assumed, 1.0, 0.0
        self._total, self._chances = [], []
        for depth in range(DEPTHS):
            hits, tries = self._hits[depth], self._tries[depth]  # the depth before is the prior
            chance = (hits + ASSUMED * chance) / (tries + ASSUMED)
            self._chances.append(chance)
            right *= chance
            total += right
            self._right.append(right)
            self._total.append(total)
