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

GUESS = 0.7
"""What the MTP head's first guess is worth before anything is known."""

MEMORY = 64
"""Events after which a record begins to fade, so that it follows a text that changes its character."""

HEAD_MEMORY = 32
"""The same for the MTP head: what it is worth changes with the request, and a wrong hope costs every step."""

FORGOTTEN = 0.03
"""Of what is known of a depth, with each draft that ends above it: else one early error would stand for ever
where a draft of fewer tokens pays as well."""

REMEMBERED = 2
"""Events that what was learnt long ago counts for, when a head that rested is tried again."""

CERTAIN = 0.05
"""What a head that claims to be certain is taken to doubt: its claim can be wrong, too."""

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
    """How often the MTP head was right, by depth, and what its own doubts are worth.

    It was trained to guess one token ahead: the further it drafts from its own guesses, the less they hold.
    """

    __slots__ = ("_chances", "_of", "doubts", "events", "hits", "misses", "tested", "wrong")

    def __init__(self) -> None:
        self.hits: list[float] = []
        self.misses: list[float] = []
        """Of guesses of which those before were right, by depth."""
        self.tested = self.wrong = self.doubts = 0.0
        """Guesses put to the test, which are the right ones and the first wrong one; how many were wrong; and
        the sum of the head's doubts about all of them."""
        self.events = 0
        self._chances: tuple[float, ...] = ()
        self._of = (0, 0)
        """The events, one's own and others', that they are drawn from."""

    def add(self, sure: list[float], accepted: int) -> None:
        """A draft with these confidences was verified, and `accepted` of its tokens were right."""
        self.events += 1
        tested = min(accepted + 1, len(sure))
        while len(self.hits) < tested:
            self.hits.append(0.0)
            self.misses.append(0.0)
        for depth in range(tested):
            counts = self.hits if depth < accepted else self.misses
            counts[depth] += 1
            if self.hits[depth] + self.misses[depth] > HEAD_MEMORY:
                self.hits[depth] /= 2
                self.misses[depth] /= 2
        for depth in range(tested, len(self.hits)):
            self.hits[depth] *= 1 - FORGOTTEN
            self.misses[depth] *= 1 - FORGOTTEN
        self.tested += tested
        self.wrong += tested - min(accepted, tested)
        self.doubts += sum(map(doubt, sure[:tested]))
        if self.tested > 2 * HEAD_MEMORY:
            self.tested, self.wrong, self.doubts = self.tested / 2, self.wrong / 2, self.doubts / 2

    def errors(self, experience: Confidence) -> float:
        """Wrong guesses for each that the head's doubts promised; below 1 where it is too modest."""
        broad = (experience.wrong + 0.5) / (experience.doubts + 0.5)
        return (self.wrong + 0.5 * broad) / (self.doubts + 0.5)

    def chances(self, experience: Confidence, n: int) -> tuple[float, ...]:
        """Of `n` guesses whose confidence is not known yet: each one's chance if those before it are right.

        What this record lacks, `experience` makes up for, and what that lacks the depth before, than which
        no depth is thought better: a few lucky drafts would have much longer ones follow.
        """
        if len(self._chances) < n or self._of != (self.events, experience.events):
            chances, chance = [], GUESS
            for depth in range(n):
                broad = _blend(*experience.at(depth), chance, 4)
                chance = min(chance if depth else 1.0, _blend(*self.at(depth), broad, 4))
                chances.append(chance)
            self._chances, self._of = tuple(chances), (self.events, experience.events)
        return self._chances[:n]

    def forget(self) -> None:
        """Have what comes next count for more than all that was."""
        self.events += 1
        for depth, (hits, misses) in enumerate(zip(self.hits, self.misses, strict=True)):
            share = min(1.0, REMEMBERED / max(1.0, hits + misses))
            self.hits[depth], self.misses[depth] = share * hits, share * misses

    def at(self, depth: int) -> tuple[float, float]:
        """Hits and misses."""
        return (self.hits[depth], self.misses[depth]) if depth < len(self.hits) else (0.0, 0.0)


def doubt(sure: float) -> float:
    """The chance that a guess is wrong of which the head is so `sure`, as far as the head knows."""
    return 1 - sure + CERTAIN


def _blend(hits: float, misses: float, prior: float, weight: float) -> float:
    return (hits + weight * prior) / (hits + misses + weight)
