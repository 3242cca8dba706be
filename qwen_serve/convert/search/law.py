"""The additive model: a tensor's share of the divergence is `scale * error ** power` of its group."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

import numpy as np

from qwen_serve.convert.search.groups import Type

POWERS = (0.5, 2.0)
FLOOR = 1e-12
"""Least divergence in nats, for probes that measure zero or, due to rounding, less."""


@dataclass(frozen=True)
class Sensitivity:
    """Divergence [nats] of a group: the sum over its tensors of `scale * error ** power`.

    To second order a divergence grows with the square of the change in weights, and the error (the product's
    relative squared error) is such a square. So `power` is near 1. It is less if a group's error is large.
    """

    scale: float
    power: float

    def cost(self, error: float) -> float:
        """The divergence of one tensor at a type with this error."""
        return float(self.scale * max(error, 0.0) ** self.power)


def fit(errors: Sequence[Mapping[Type, float]], measured: Mapping[Type, float]) -> Sensitivity:
    """Fits a group's law from its tensors' errors by type, and its divergence with all of them at one
    type."""
    from scipy.optimize import minimize_scalar

    kinds = list(measured)
    targets = np.log([max(measured[kind], FLOOR) for kind in kinds])
    table = np.array([[max(each[kind], FLOOR) for each in errors] for kind in kinds])

    def offsets(power: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.asarray(targets - np.log((table**power).sum(axis=1)))

    if len(kinds) == 1:
        return Sensitivity(exp(float(offsets(1.0)[0])), 1.0)
    best = minimize_scalar(lambda power: float(np.var(offsets(power))), bounds=POWERS, method="bounded")
    power = float(best.x)
    return Sensitivity(exp(float(offsets(power).mean())), power)


def left_out_error(errors: Sequence[Mapping[Type, float]], measured: Mapping[Type, float]) -> float:
    """|log(predicted / measured)| of the middle probe, predicted from the others; 0 if there are too few."""
    if len(measured) < 3:
        return 0.0
    middle = sorted(measured, key=lambda kind: measured[kind])[len(measured) // 2]
    law = fit(errors, {kind: value for kind, value in measured.items() if kind != middle})
    predicted = sum(law.cost(each[middle]) for each in errors)
    return abs(log(max(predicted, FLOOR) / max(measured[middle], FLOOR)))
