"""Ratios with intervals, paired by round; whether two subjects are told apart is decided by the interval
alone.

What drifts on a machine hits every subject of a round alike, so rounds are paired: of each cell the medians
of a round, their log ratio, the mean over cells; the ratio is the geometric mean over rounds. Its 95%
interval is the percentile bootstrap over rounds, whose level is raised so that it is as wide as Student's
interval where rounds are few (Hesterberg, "What Teachers Should Know About the Bootstrap", Am. Stat. 69,
2015, section 3.3): the plain one covers 90% at ten rounds.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from bench.metrics import METRICS

DEFAULT_ROUNDS = 10
"""At this many a difference of 6% is found where rounds scatter by 3%; fewer settle nothing below 10%."""

LEAST_ROUNDS = 5
"""With fewer there is no interval: even if all rounds fell to one side, chance would do that once in
eight."""

LEVEL = 0.95
RESAMPLES = 9999

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as good as the reference: above 1 is better, whichever way the metric counts.

    ``low`` and ``high`` bound 95%; None where ``rounds`` are too few for an interval. ``paired`` False: of
    different runs, so that a drift of the machine between them is in the ratio and not in its interval.
    """

    value: float
    low: float | None
    high: float | None
    rounds: int
    paired: bool = True

    @property
    def told_apart(self) -> bool:
        """Whether the interval leaves 1 out."""
        return self.low is not None and self.high is not None and not self.low <= 1.0 <= self.high

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.2f}x ({self.rounds} rounds: no interval)"
        return f"{self.value:.3g}x [{self.low:.3g}, {self.high:.3g}]"

    @property
    def verdict(self) -> str:
        """With its interval, and what that settles."""
        if self.low is None:
            return f"{self.value:.3g}x, fewer than {LEAST_ROUNDS} rounds"
        known = "" if self.told_apart or self.low == self.high else ", not told apart"
        if self.told_apart and self.rounds < DEFAULT_ROUNDS and abs(np.log(self.value)) < np.log(1.1):
            known = f", fewer than {DEFAULT_ROUNDS} rounds"
        return f"{self}{known}{'' if self.paired else ', unpaired'}"


def compare_subjects(frame: pd.DataFrame, subject: str, reference: str, metric: str) -> Ratio | None:
    """Over all cells that both have, each counting alike: paired by round where they were measured in one
    run, else unpaired. None without any, or where the metric has no better side."""
    better = METRICS[metric].better
    if better is None or subject == reference:
        return None
    if (paired := times_as_good(frame, subject, reference, metric)) is not None:
        return paired
    medians = by_round(frame, metric)
    rounds = medians[medians > 0].rename("value").reset_index()
    both = [
        rounds[rounds["subject"] == name].pivot(
            index=["run", "round"], columns=["workload", "cell"], values="value"
        )
        for name in (subject, reference)
    ]
    cells = both[0].columns.intersection(both[1].columns)
    ours, theirs = (np.exp(np.log(one[cells].dropna()).mean(axis=1)) for one in both)
    return unpaired(ours, theirs, lower_is_better=better == "lower") if len(cells) else None


def times_as_good(frame: pd.DataFrame, subject: str, reference: str, metric: str) -> Ratio | None:
    """``subject`` against ``reference`` in one metric, over all cells that both have.

    ``frame`` holds rows of the store (`bench.store.COLUMNS`), of one workload or of several that are to count
    alike. Rounds are those of one run; those in which either lacks a cell are left out. None without any.
    """
    logs = _log_medians(frame, metric)
    if subject not in logs.columns or reference not in logs.columns:
        return None
    difference = (logs[subject] - logs[reference]).dropna().unstack(["workload", "cell"]).dropna()
    if difference.empty:
        return None
    sign = -1.0 if METRICS[metric].better == "lower" else 1.0
    return interval(sign * difference.mean(axis=1).to_numpy(dtype=np.float64))


def interval(logs: Floats) -> Ratio:
    """The geometric mean of paired ratios, given as their logarithms, one a round."""
    value, rounds = float(np.exp(logs.mean())), len(logs)
    if rounds < LEAST_ROUNDS:
        return Ratio(value, None, None, rounds)
    if np.ptp(logs) == 0.0:
        return Ratio(value, value, value, rounds)
    low, high = np.exp(_bootstrap((logs,), np.mean, rounds))
    return Ratio(value, float(low), float(high), rounds)


def unpaired(subject: Iterable[float], reference: Iterable[float], *, lower_is_better: bool) -> Ratio | None:
    """For runs of different times, whose rounds do not belong together: what drifted between them is not seen
    by the interval, so a small difference it tells apart may still be the machine's."""
    ours, theirs = (np.log(np.fromiter(values, dtype=np.float64)) for values in (subject, reference))
    if not len(ours) or not len(theirs):
        return None
    sign = -1.0 if lower_is_better else 1.0
    value, rounds = float(np.exp(sign * (ours.mean() - theirs.mean()))), min(len(ours), len(theirs))
    if rounds < LEAST_ROUNDS:
        return Ratio(value, None, None, rounds, paired=False)

    def difference(left: Floats, right: Floats, axis: int = -1) -> Any:
        return sign * (left.mean(axis=axis) - right.mean(axis=axis))

    low, high = np.exp(_bootstrap((ours, theirs), difference, rounds))
    return Ratio(value, float(low), float(high), rounds, paired=False)


def by_round(frame: pd.DataFrame, metric: str) -> pd.Series:
    """The median of a metric in each round: indexed by run, workload, cell, round, subject."""
    keys = ["run", "workload", "cell", "round", "subject"]
    return frame[frame["metric"] == metric].groupby(keys, sort=False)["value"].median()


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of ``count`` values, in their own unit."""

    p10: float
    p50: float
    p90: float
    p99: float
    count: int


def percentiles(frame: pd.DataFrame, metric: str, *keys: str) -> dict[tuple[str, ...], Spread]:
    """Of all values of a metric, by the values of the columns ``keys``, in the order they were measured."""
    rows = frame[frame["metric"] == metric]
    found = {}
    for key, values in rows.groupby(list(keys), sort=False)["value"]:
        p10, p50, p90, p99 = (float(at) for at in np.percentile(values, (10, 50, 90, 99)))
        found[tuple(map(str, key))] = Spread(p10, p50, p90, p99, len(values))
    return found


def _log_medians(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    medians = by_round(frame, metric)
    positive = medians[medians > 0]
    return positive.map(np.log).unstack("subject")


def _bootstrap(samples: tuple[Floats, ...], statistic: Any, rounds: int) -> tuple[float, float]:
    student = stats.t.ppf((1 + LEVEL) / 2, rounds - 1) * np.sqrt(rounds / (rounds - 1))
    found = stats.bootstrap(
        samples,
        statistic,
        n_resamples=RESAMPLES,
        confidence_level=1 - 2 * stats.norm.cdf(-student),
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(found.low), float(found.high)
