"""Chooses one type for each tensor at least cost under limits: a multiple-choice knapsack, as a MILP
(HiGHS)."""

from collections.abc import Sequence
from typing import Final

import numpy as np

GAP: Final = 1e-5
"""Allowed relative distance of a solution from the optimum."""

SECONDS: Final = 60.0


def choose(
    costs: Sequence[Sequence[float]],
    limited: Sequence[tuple[Sequence[Sequence[float]], float]],
) -> list[int] | None:
    """The index of each item's choice, so that the sum of `costs` is least and every limited sum is within
    its limit.

    Args:
        costs: by item, the cost of each of its choices.
        limited: (amounts by item and choice, the limit of their sum).

    Returns: None if no choice meets the limits.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_matrix

    counts = [len(row) for row in costs]
    flat = np.concatenate([np.asarray(row, np.float64) for row in costs])
    owner = np.repeat(np.arange(len(counts)), counts)
    one_each = csr_matrix((np.ones(flat.size), (owner, np.arange(flat.size))), (len(counts), flat.size))
    constraints = [LinearConstraint(one_each, 1, 1)]
    for amounts, limit in limited:
        row = np.concatenate([np.asarray(each, np.float64) for each in amounts])
        unit = max(float(np.abs(row).max()), 1e-300)  # keeps the solver's tolerances relative
        constraints.append(LinearConstraint(row[None] / unit, -np.inf, limit / unit))
    scale = max(float(np.abs(flat).max()), 1e-300)
    found = milp(
        flat / scale,
        integrality=np.ones(flat.size),
        bounds=Bounds(0, 1),
        constraints=constraints,
        # presolve would save little, and prints a line of its own to the terminal
        options={"mip_rel_gap": GAP, "time_limit": SECONDS, "presolve": False},
    )
    if found.x is None:
        return None
    starts = np.cumsum([0, *counts[:-1]])
    return [
        int(np.argmax(found.x[start : start + count])) for start, count in zip(starts, counts, strict=True)
    ]
