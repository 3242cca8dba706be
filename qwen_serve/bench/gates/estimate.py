"""Computes scores with 95% intervals from right and wrong answers, and losses against a reference."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt

from scipy.stats import binomtest, norm

Z = float(norm.ppf(0.975))  # two-sided 95%

# an item's outcomes, each from 0 to 1; IFEval has one for each instruction, others one for the item
Outcomes = Sequence[float]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A score from 0 to 1, with the 95% interval of the whole benchmark's score."""

    score: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Paired:
    """Two models' answers to the same items. ``lost``: items that only the reference got right; ``gained``:
    the reverse."""

    lost: int
    gained: int

    @classmethod
    def of(cls, pairs: Iterable[tuple[Outcomes, Outcomes]]) -> "Paired":
        """Count (answer, reference) pairs. Of an item with several outcomes, the side with more right ones
        wins."""
        differences = [sum(found) - sum(known) for found, known in pairs]
        return cls(sum(one < 0 for one in differences), sum(one > 0 for one in differences))

    def __add__(self, other: "Paired") -> "Paired":
        return Paired(self.lost + other.lost, self.gained + other.gained)

    @property
    def p_value(self) -> float:
        """The probability that two equally good models differ by at least as much: McNemar's exact two-sided
        test."""
        trials = self.lost + self.gained
        return float(binomtest(self.lost, trials).pvalue) if trials else 1.0

    @property
    def worse(self) -> bool:
        """Whether the loss is significant at 5%."""
        return self.lost > self.gained and self.p_value < 0.05

    @property
    def p_text(self) -> str:
        """The p value as text, with a sensible number of digits."""
        p = self.p_value
        return f"p = {p:.2g}" if p >= 0.001 else "p < 0.001"

    def __str__(self) -> str:
        return f"{self.lost} lost, {self.gained} gained, {self.p_text}"


def estimate(strata: Sequence[Sequence[Outcomes]]) -> Estimate:
    """The mean of the strata's (subtasks') mean outcomes, with Wilson's interval.

    A plain proportion gets Wilson's interval (J. Am. Stat. Assoc. 22, 1927) for its number of items. If items
    have several outcomes, or if strata of different sizes weigh the same, the effective number of items is
    used, p (1 - p) / variance, with the variance of the ratio estimator (Korn and Graubard, Survey
    Methodology 24, 1998). Each stratum needs at least one item, each item at least one outcome.
    """
    rates: list[float] = []
    variance = 0.0
    for items in strata:
        outcomes = sum(len(item) for item in items)
        rate = sum(sum(item) for item in items) / outcomes
        rates.append(rate)
        variance += sum((sum(item) - rate * len(item)) ** 2 for item in items) / outcomes**2
    score = sum(rates) / len(rates)
    variance /= len(strata) ** 2
    items_asked = sum(len(items) for items in strata)
    outcomes_seen = sum(len(item) for items in strata for item in items)
    if 0.0 < score < 1.0 and variance > 0.0:
        size = min(score * (1.0 - score) / variance, outcomes_seen)
    else:
        size = items_asked
    return Estimate(score, *wilson(score, size))


def wilson(rate: float, size: float) -> tuple[float, float]:
    """Wilson's 95% interval of a proportion in ``size`` trials. scipy's function accepts only an integer
    size."""
    centre = (rate + Z**2 / (2 * size)) / (1 + Z**2 / size)
    half = Z / (1 + Z**2 / size) * sqrt(rate * (1 - rate) / size + Z**2 / (4 * size**2))
    # rounding may put the bounds outside of 0 and 1 at a rate of 0 or 1
    return max(0.0, min(rate, centre - half)), min(1.0, max(rate, centre + half))
