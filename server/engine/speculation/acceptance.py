"""How likely the next draft is to be right, learnt from those before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

BOUNDS = (4, 16)
"""Matches of fewer tokens than the first, fewer than the second, and the rest are counted apart."""

ASSUMED = (0.5, 0.8, 0.97)
"""What the three are worth before anything is known; only their order matters for long."""

MEMORY = 64
"""Events after which a record begins to fade, so that it follows a text that changes its character."""

_KIND = np.array([0] * BOUNDS[0] + [1] * (BOUNDS[1] - BOUNDS[0]) + [2], np.intp)


class Record:
    """Hits and misses of n-gram guesses, by the length of the match that they rested on."""

    __slots__ = ("hits", "misses")

    def __init__(self) -> None:
        self.hits = [0.0, 0.0, 0.0]
        self.misses = [0.0, 0.0, 0.0]

    def add(self, match: int, hit: bool) -> None:
        """A guess of one token after a match of `match` tokens came out."""
        kind = 2 if match >= BOUNDS[1] else int(match >= BOUNDS[0])
        counts = self.hits if hit else self.misses
        counts[kind] += 1
        self._fade(kind, MEMORY)

    def merge(self, other: Record) -> None:
        """Add what another record holds."""
        for kind in range(3):
            self.hits[kind] += other.hits[kind]
            self.misses[kind] += other.misses[kind]
            self._fade(kind, 4 * MEMORY)

    def chances(self, match: int, n: int, experience: Record) -> npt.NDArray[np.float64]:
        """For `n` guesses in a row after a match of `match` tokens: each one's chance if those before it hit.

        A hit makes the match longer. What this record lacks, `experience` and then `ASSUMED` make up for.
        """
        by_kind = []
        for kind, assumed in enumerate(ASSUMED):
            broad = _blend(experience.hits[kind], experience.misses[kind], assumed, 4)
            by_kind.append(_blend(self.hits[kind], self.misses[kind], broad, 6))
        lengths = np.minimum(np.arange(match, match + n), BOUNDS[1])
        return np.array(by_kind)[_KIND[lengths]]

    def _fade(self, kind: int, most: float) -> None:
        if self.hits[kind] + self.misses[kind] > most:
            self.hits[kind] /= 2
            self.misses[kind] /= 2


class Confidence:
    """How far the MTP head's own confidence in its drafts is to be trusted, for one sequence or all.

    `accepted` counts drafts that were right, `expected` sums the confidence of all that were put to the test:
    those accepted and the first one rejected. Their quotient corrects the confidence of the next.
    """

    __slots__ = ("accepted", "expected", "tested")

    def __init__(self) -> None:
        self.accepted = self.expected = self.tested = 0.0

    def add(self, sure: list[float], accepted: int) -> None:
        """A draft with these confidences was verified, and `accepted` of its tokens were right."""
        tested = min(accepted + 1, len(sure))
        self.accepted += accepted
        self.tested += tested
        self.expected += sum(sure[:tested])
        if self.tested > MEMORY:
            self.accepted, self.tested, self.expected = self.accepted / 2, self.tested / 2, self.expected / 2

    def trust(self, experience: Confidence) -> float:
        """Accepted drafts for each one that the head's confidence promised; 1 where the head is right."""
        broad = (experience.accepted + 4) / (experience.expected + 4)
        return min(1.0, (self.accepted + 6 * broad) / (self.expected + 6))

    def chance(self, experience: Confidence) -> float:
        """The chance of a draft token of which the confidence is not known yet."""
        broad = _blend(experience.accepted, experience.tested - experience.accepted, 0.7, 4)
        return _blend(self.accepted, self.tested - self.accepted, broad, 6)


def _blend(hits: float, misses: float, prior: float, weight: float) -> float:
    return (hits + weight * prior) / (hits + misses + weight)
