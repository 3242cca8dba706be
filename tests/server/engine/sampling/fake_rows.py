"""A row of logits, sampled on the host."""

from typing import Any

import numpy as np

from qwen_serve.llamacpp.row_results import RowResult
from qwen_serve.server.engine.sampling import Sampler
from tests.llamacpp.in_numpy import sampled


class SmallVocab:
    n_real, eog_ids, size = 1000, frozenset({999}), 1024


class HostRows:
    """A row that a sampler is about to choose from."""

    def __init__(self, sampler: Sampler, logits: np.ndarray[Any, Any]) -> None:
        asked = sampler.constrained(())
        masks = [] if asked is None else asked[0].masks(asked[1])
        self._results = sampled(sampler.requests((), -1, masks), [logits])

    def result(self, row: int) -> RowResult:
        return self._results[row]


def choose(sampler: Sampler, logits: np.ndarray[Any, Any]) -> int:
    """The token that the sampler chooses from a whole row."""
    token = sampler.choose(HostRows(sampler, logits), 0)
    assert token is not None
    return token
