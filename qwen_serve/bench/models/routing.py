"""How unevenly the synthetic model's router uses its experts."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from qwen_serve.bench.errors import BenchError

MOST = 0.45
"""Maximum share of the tokens that one expert may get. A logit of zero mean exceeds another half of
the time."""


def zipf_scales(n_experts: int, n_used: int, exponent: float) -> npt.NDArray[np.float32]:
    """Factors for the rows of a random router, [n_experts].

    The expert of rank r is then one of a token's `n_used` for a share of tokens in proportion to
    r**-exponent, at most `MOST`.

    Logits are normally distributed. With the scale 1/z, where z is the quantile of what a share leaves, an
    expert's logit is above 1 for that share of tokens, and `n_used` are on average.

    Raises BenchError for an exponent below 0, and where nearly half of the experts are used.
    """
    if not 0 <= exponent <= 4:
        raise BenchError(f"--routing-zipf {exponent:g}: want an exponent from 0, where all are alike, to 4")
    if n_used > MOST * n_experts:
        raise BenchError(f"--routing-zipf: {n_used} of {n_experts} experts are used, too many to differ")
    falling = np.arange(1.0, n_experts + 1) ** -exponent
    # the scale at which all have MOST, or their sum is large enough
    low, high = 0.0, n_used / float(falling[-1])
    for _ in range(100):
        middle = (low + high) / 2
        enough = np.minimum(MOST, middle * falling).sum() >= n_used
        low, high = (low, middle) if enough else (middle, high)
    shares = np.minimum(MOST, high * falling)
    quantiles = np.array([NormalDist().inv_cdf(1 - float(share)) for share in shares])
    scales: npt.NDArray[np.float32] = (quantiles.mean() / quantiles).astype(np.float32)
    return scales
