"""Two subjects in one metric: paired by round where they were measured in one run, else unpaired and said
so."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from bench.analysis.statistics import LEAST_ROUNDS, Ratio, by_round, times_as_good, unpaired
from bench.metrics import METRICS


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many times as good as the reference. ``paired`` False: of different runs, so that a drift of the
    machine between them is in the ratio and not in its interval."""

    ratio: Ratio
    paired: bool

    def __str__(self) -> str:
        if self.ratio.low is None:
            return f"{self.ratio.value:.3g}x, fewer than {LEAST_ROUNDS} rounds"
        known = "" if self.ratio.told_apart else ", not told apart"
        return f"{self.ratio}{known}{'' if self.paired else ', unpaired'}"


def compare_subjects(frame: pd.DataFrame, subject: str, reference: str, metric: str) -> Comparison | None:
    """Over all cells that both have, each counting alike; None without any, or where the metric has no
    better side."""
    better = METRICS[metric].better
    if better is None or subject == reference:
        return None
    paired = times_as_good(frame, subject, reference, metric)
    if paired is not None:
        return Comparison(paired, paired=True)
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
    found = unpaired(ours, theirs, lower_is_better=better == "lower") if len(cells) else None
    return Comparison(found, paired=False) if found is not None else None
