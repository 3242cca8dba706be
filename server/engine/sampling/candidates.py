"""Whether the best tokens of a row, which the device found, say what the whole row would."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from .parameters import SamplingParams

MARGIN = 1e-4
"""What llama.cpp's sums of probabilities, in F32, may be off by."""


def is_settled(params: SamplingParams, known: npt.NDArray[np.float32], lowest: float) -> bool:
    """Whether top-k, top-p and min-p keep none but the tokens with the `known` logits, and the same ones,
    whatever other tokens there are with logits of at most `lowest`, which is below theirs.

    Either top-k needs no other. Or top-p or min-p, which come after it, drops all others: top-p because the
    tokens that reach its share of the mass without them, and of the most mass that they could bring, are the
    same.
    """
    if len(known) >= params.top_k or not len(known):
        return len(known) > 0
    logits = sorted(known.tolist(), reverse=True)
    weights = [math.exp((logit - logits[0]) / params.temperature) for logit in logits]
    least = math.exp((lowest - logits[0]) / params.temperature)
    kept = n = len(weights)
    if params.top_p < 1.0:
        masses = list(accumulate(weights))
        reach = (params.top_p + MARGIN) * (masses[-1] + (params.top_k - n) * least)
        kept = 1 + bisect_left(masses, (params.top_p - MARGIN) * masses[-1])
        if masses[-1] >= reach and kept == 1 + bisect_left(masses, reach):
            return True
    bound = params.min_p * (1 - MARGIN)
    return least < bound and sum(weight >= bound for weight in weights) <= kept


def best_of(logits: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.intp]:
    """Ids of the `k` highest of many logits [n], in no order; all of them if there are no more.

    The k-th highest of the maxima of blocks is a bound that at least k reach and few pass: one look at
    everything, where a partial sort would move it.
    """
    width = 256
    n_blocks = len(logits) // width
    if k >= len(logits):
        return np.arange(len(logits))
    ids = np.arange(len(logits))
    if n_blocks > 4 * k:
        maxima = logits[: n_blocks * width].reshape(n_blocks, width).max(axis=1)
        ids = np.flatnonzero(logits >= np.partition(maxima, -k)[-k])
    return ids[np.argpartition(logits[ids], -k)[-k:]] if len(ids) > k else ids
