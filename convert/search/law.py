"""The additive model: a tensor's share of the divergence is `scale * error ** power` of its group."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import minimize_scalar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from qwen_serve.convert.search.groups import Type

POWERS = (0.5, 2.0)
FLOOR = 1e-12
"""Nats; what is measured as nothing, or less by rounding."""


@dataclass(frozen=True)
class Law:
    """Divergence [nats] of a group: the sum over its tensors of `scale * error ** power`.

    To second order a divergence grows with the square of what is added to the weights, and the error (the
    product's relative squared error) is one: `power` is near 1, less where a group is far off.
    """

    scale: float
    power: float

    def cost(self, error: float) -> float:
        """Of one tensor at a type of this error."""
        return float(self.scale * max(error, 0.0) ** self.power)


def fit(errors: Sequence[Mapping[Type, float]], measured: Mapping[Type, float]) -> Law:
    """Of a group: its tensors' errors by type, and its divergence where all of them are at one type."""
    kinds = list(measured)
    targets = np.log([max(measured[kind], FLOOR) for kind in kinds])
    table = np.array([[max(each[kind], FLOOR) for each in errors] for kind in kinds])

    def offsets(power: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.asarray(targets - np.log((table**power).sum(axis=1)))

    if len(kinds) == 1:
        return Law(exp(float(offsets(1.0)[0])), 1.0)
    best = minimize_scalar(lambda power: float(np.var(offsets(power))), bounds=POWERS, method="bounded")
    power = float(best.x)
    return Law(exp(float(offsets(power).mean())), power)


def left_out_error(errors: Sequence[Mapping[Type, float]], measured: Mapping[Type, float]) -> float:
    """|log(predicted / measured)| of the middle probe by the others; 0 where there are too few."""
    if len(measured) < 3:
        return 0.0
    middle = sorted(measured, key=lambda kind: measured[kind])[len(measured) // 2]
    law = fit(errors, {kind: value for kind, value in measured.items() if kind != middle})
    predicted = sum(law.cost(each[middle]) for each in errors)
    return abs(log(max(predicted, FLOOR) / max(measured[middle], FLOOR)))
