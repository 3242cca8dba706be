"""A row of logits, with the device's figures and as a whole on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from qwen_serve.llamacpp import DeviceSampler

if TYPE_CHECKING:
    from qwen_serve.llamacpp import Rows
    from qwen_serve.server.engine.sampling import Sampler


class SmallVocab:
    n_real, eog_ids, size = 1000, frozenset({999}), 1024


class DeviceRows:
    """A row of which the device returns the best 64 tokens."""

    kinds = (DeviceSampler.TOP_K,)

    def __init__(self, logits: np.ndarray[Any, Any]) -> None:
        self.row, self.fetched = logits, 0

    def candidates(self, row: int) -> Any:
        ids = np.argsort(-self.row[:1000], kind="stable")[:64].astype(np.int32)
        np.random.default_rng(0).shuffle(ids)
        return ids, self.row[ids]

    def fetch(self, row: int) -> Any:
        self.fetched += 1
        return self.row.copy()


class HostRows(DeviceRows):
    kinds = (DeviceSampler.ROW,)

    def unchecked(self, row: int) -> Any:
        return self.row.copy()

    logits = unchecked


def choose(sampler: Sampler, logits: np.ndarray[Any, Any]) -> int:
    """The token that the sampler chooses from a whole row."""
    token = sampler.sample(cast("Rows", HostRows(logits)), 0)
    assert token is not None
    return token
