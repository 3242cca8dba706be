"""Ratios with intervals, paired by round. A difference is significant if the interval excludes 1.

Drift of a machine affects all subjects of a round alike, so ratios are paired by round: the log ratio of a
round's medians, averaged over cells. The ratio is the geometric mean over rounds, with Student's 95% interval
of the log ratios. A bootstrap cannot leave the range of the measured means: with five rounds, a widened one
contained the true value only 93% of the time.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from qwen_serve.bench.metrics import METRICS

DEFAULT_ROUNDS = 10
"""With this many rounds a difference of 6% is found if rounds scatter by 3%. Fewer cannot settle differences
below 10%.
"""

LEAST_ROUNDS = 8
"""Minimum rounds for an interval. With fewer, the scatter is hardly known, and one outlier decides."""

LEVEL = 0.95
ALIKE = 1e-12
"""Differences between logarithms up to this value are rounding errors."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as good as the reference a subject is. Above 1 is better, whether the metric is better
    lower or higher.

    ``low`` and ``high``: the 95% interval; None if there are too few ``rounds``. ``paired`` False: the ratio
    is of different runs. It contains the machine's drift between them, which the interval does not cover.
    """

    value: float
    low: float | None
    high: float | None
    rounds: int
    paired: bool = True

    @property
    def significant(self) -> bool:
        """Whether the difference is significant: the interval excludes 1."""
        return self.low is not None and self.high is not None and not self.low <= 1.0 <= self.high

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.2f}x ({self.rounds} rounds: no interval)"
        return f"{self.value:.3g}x [{self.low:.3g}, {self.high:.3g}]"

    @property
    def verdict(self) -> str:
        """The ratio with its interval, and whether it is significant, in words."""
        if self.low is None:
            return f"{self.value:.3g}x, fewer than {LEAST_ROUNDS} rounds"
        known = "" if self.significant or self.low == self.high else ", not told apart"
        if self.significant and self.rounds < DEFAULT_ROUNDS and abs(np.log(self.value)) < np.log(1.1):
            known = f", fewer than {DEFAULT_ROUNDS} rounds"
        return f"{self}{known}{'' if self.paired else ', unpaired'}"


def compare_subjects(frame: pd.DataFrame, subject: str, reference: str, metric: str) -> Ratio | None:
    """The ratio over all cells that both subjects have, with equal weights: paired by round if they were
    measured in one run, else unpaired. None without such cells, or if the metric has no better direction.
    """
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
    """The paired ratio of ``subject`` to ``reference`` in one metric, over all cells that both have.

    ``frame``: rows of the store (`bench.store.COLUMNS`), of one workload or of several with equal weights.
    Rounds of one run are paired; rounds in which either subject lacks a cell are left out. None if no round
    is left.
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
    """The geometric mean of paired ratios with its interval. ``logs``: a log ratio for each round."""
    value, rounds = float(np.exp(logs.mean())), len(logs)
    if rounds < LEAST_ROUNDS:
        return Ratio(value, None, None, rounds)
    if np.ptp(logs) < ALIKE:
        return Ratio(value, value, value, rounds)
    found = stats.ttest_1samp(logs, 0.0).confidence_interval(LEVEL)
    return Ratio(value, float(np.exp(found.low)), float(np.exp(found.high)), rounds)


def unpaired(subject: Iterable[float], reference: Iterable[float], *, lower_is_better: bool) -> Ratio | None:
    """The ratio of runs at different times, whose rounds cannot be paired, with Welch's interval. The
    interval does not cover drift between the runs, so a small difference may be the machine's.
    """
    ours, theirs = (np.log(np.fromiter(values, dtype=np.float64)) for values in (subject, reference))
    if not len(ours) or not len(theirs):
        return None
    if lower_is_better:
        ours, theirs = -ours, -theirs
    value, rounds = float(np.exp(ours.mean() - theirs.mean())), min(len(ours), len(theirs))
    if rounds < LEAST_ROUNDS:
        return Ratio(value, None, None, rounds, paired=False)
    if max(np.ptp(ours), np.ptp(theirs)) < ALIKE:
        return Ratio(value, value, value, rounds, paired=False)
    found = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(LEVEL)
    return Ratio(value, float(np.exp(found.low)), float(np.exp(found.high)), rounds, paired=False)


def by_round(frame: pd.DataFrame, metric: str) -> pd.Series:
    """The median of a metric in each round, indexed by run, workload, cell, round, subject."""
    keys = ["run", "workload", "cell", "round", "subject"]
    return frame[frame["metric"] == metric].groupby(keys, sort=False)["value"].median()


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of ``count`` values, in the unit of the values."""

    p10: float
    p50: float
    p90: float
    p99: float
    count: int


def percentiles(frame: pd.DataFrame, metric: str, *keys: str) -> dict[tuple[str, ...], Spread]:
    """Percentiles of a metric's values, grouped by the columns ``keys``, in the order of measurement."""
    groups = frame[frame["metric"] == metric].groupby(list(keys), sort=False)["value"]
    counts = groups.size()
    if counts.empty:
        return {}
    spread = groups.quantile(np.array([0.1, 0.5, 0.9, 0.99])).unstack().reindex(counts.index)
    return {
        tuple(map(str, key if isinstance(key, tuple) else (key,))): Spread(p10, p50, p90, p99, count)
        for key, (p10, p50, p90, p99), count in zip(
            counts.index, spread.to_numpy().tolist(), counts.tolist(), strict=True
        )
    }


def _log_medians(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    medians = by_round(frame, metric)
    positive = medians[medians > 0]
    return positive.map(np.log).unstack("subject")
