"""Computes a score with a 95% interval from right and wrong answers, and losses against a reference."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt

from scipy.stats import binomtest, norm

Z = float(norm.ppf(0.975))  # two-sided 95%

# one item's outcomes, each 0 to 1: one, or in IFEval one for each instruction
Outcomes = Sequence[float]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A score between 0 and 1, and an interval for the whole benchmark, given the drawn items."""

    score: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Paired:
    """The same items answered twice: the items that only the reference got right, and the reverse."""

    lost: int
    gained: int

    @classmethod
    def of(cls, pairs: Iterable[tuple[Outcomes, Outcomes]]) -> "Paired":
        """Counts (answer, reference) pairs; for an item with several outcomes, which one had more right."""
        differences = [sum(found) - sum(known) for found, known in pairs]
        return cls(sum(one < 0 for one in differences), sum(one > 0 for one in differences))

    def __add__(self, other: "Paired") -> "Paired":
        return Paired(self.lost + other.lost, self.gained + other.gained)

    @property
    def p_value(self) -> float:
        """How often two equally good models would differ by as much: McNemar's test, exact, two-sided."""
        trials = self.lost + self.gained
        return float(binomtest(self.lost, trials).pvalue) if trials else 1.0

    @property
    def worse(self) -> bool:
        """Whether the loss is more than chance explains, at 5%."""
        return self.lost > self.gained and self.p_value < 0.05

    @property
    def p_text(self) -> str:
        """The p value in words, as precise as useful."""
        p = self.p_value
        return f"p = {p:.2g}" if p >= 0.001 else "p < 0.001"

    def __str__(self) -> str:
        return f"{self.lost} lost, {self.gained} gained, {self.p_text}"


def estimate(strata: Sequence[Sequence[Outcomes]]) -> Estimate:
    """The mean of the strata's (subtasks') mean outcomes, with a Wilson interval.

    A plain proportion gets Wilson's interval (J. Am. Stat. Assoc. 22, 1927) on its number of items. Where
    items bring several outcomes or strata weigh the same whatever their size, the number of items is replaced
    by the effective one, p (1 - p) / variance, with the variance of the ratio estimator (Korn and Graubard,
    Survey Methodology 24, 1998). Never fewer than one item a stratum and one outcome an item.
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
    """The 95% score interval of a proportion seen in ``size`` trials; scipy's wants a whole number."""
    centre = (rate + Z**2 / (2 * size)) / (1 + Z**2 / size)
    half = Z / (1 + Z**2 / size) * sqrt(rate * (1 - rate) / size + Z**2 / (4 * size**2))
    # the bounds are within 0 and 1 except for rounding at a rate of 0 or 1
    return max(0.0, min(rate, centre - half)), min(1.0, max(rate, centre + half))
