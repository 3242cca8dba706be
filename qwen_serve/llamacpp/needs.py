"""What a request needs of a row, and so what the device does with it."""

from __future__ import annotations

from enum import IntEnum


class DeviceSampler(IntEnum):
    """What a row returns to the host. Banned tokens are those that only pad the vocabulary."""

    BEST = 1
    """The best token that is not banned, and the best one that also does not end a generation."""
    TOP_K = 2
    """The N_CANDIDATES best tokens that are not banned, and their logits, in no order."""
    LOGPROBS = 3
    """Like TOP_K, with the normalizer of log-probabilities: the logarithm of the sum of all logits'
    exponentials, padding included."""
    GUESS = 4
    """The best token and its probability; nothing is banned."""
    ROW = 5
    """The logits, untouched."""

    def serves(self, need: DeviceSampler) -> bool:
        """Whether a sequence id with this device sampler can serve a request that needs `need`."""
        return self is need or self is DeviceSampler.ROW or need < self <= DeviceSampler.LOGPROBS
