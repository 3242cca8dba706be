"""The knapsack's solution against all choices, and the fitted law against data that follow it."""

from itertools import product

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from qwen_serve.convert.search.law import fit, left_out_error
from qwen_serve.convert.search.solve import choose


@pytest.mark.parametrize("seed", range(8))
def test_no_choice_under_the_limits_costs_less(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(2, 5, size=6)
    sizes = [sorted(rng.integers(1, 10**6, size=n).astype(float)) for n in counts]
    times = [list(rng.random(n)) for n in counts]
    costs = [sorted(rng.random(n) ** 4, reverse=True) for n in counts]
    for share in (0.0, 0.3, 0.6, 1.0):
        least, most = sum(map(min, sizes)), sum(map(max, sizes))
        room = least + share * (most - least)
        found = choose(costs, [(sizes, room), (times, 3.0)])
        allowed = [
            sum(c[i] for c, i in zip(costs, pick, strict=True))
            for pick in product(*(range(n) for n in counts))
            if sum(s[i] for s, i in zip(sizes, pick, strict=True)) <= room
            and sum(t[i] for t, i in zip(times, pick, strict=True)) <= 3.0
        ]
        if not allowed:
            assert found is None
            continue
        assert found is not None
        assert sum(s[i] for s, i in zip(sizes, found, strict=True)) <= room
        assert sum(c[i] for c, i in zip(costs, found, strict=True)) == pytest.approx(min(allowed), rel=1e-4)


def test_a_law_is_found_again() -> None:
    errors = [
        {Type.Q2_K: 0.09, Type.Q4_K: 0.005, Type.Q6_K: 3e-4},
        {Type.Q2_K: 0.2, Type.Q4_K: 0.01, Type.Q6_K: 1e-3},
    ]
    measured = {kind: 0.3 * sum(each[kind] ** 1.2 for each in errors) for kind in errors[0]}
    law = fit(errors, measured)
    assert (law.scale, law.power) == (pytest.approx(0.3, rel=1e-3), pytest.approx(1.2, rel=1e-3))
    assert left_out_error(errors, measured) < 1e-3
    measured[Type.Q4_K] *= 2
    assert left_out_error(errors, measured) == pytest.approx(np.log(2), rel=0.01)


def test_a_group_that_costs_nothing_has_a_law_all_the_same() -> None:
    law = fit([{Type.Q2_K: 0.1, Type.Q8_0: 0.0}], {Type.Q2_K: 0.0, Type.Q8_0: 0.0})
    assert 0 <= law.cost(0.1) < 1e-9
