"""A demanding constraint: few tokens are allowed, they depend on all earlier tokens, and tokens are often
forced."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from qwen_serve.llamacpp.row_sampler import Bits
from qwen_serve.server.engine.sampling.constraint import Mask


def packed(mask: Mask) -> Bits:
    """The mask in bits."""
    bits = np.packbits(mask, bitorder="little")
    return np.pad(bits, (0, -len(bits) % 4)).view(np.uint32)


FIRST, LAST = 256, 2000
"""Ordinary tokens of nano."""


class Fickle:
    """Allows a share of the vocabulary, at least three tokens, and forces one to four tokens at regular
    intervals. `mask`, `accept` and `forced` depend only on the tokens so far."""

    def __init__(self, n_vocab: int, share: float = 0.3, every: int = 5, seed: int = 0) -> None:
        self.n_vocab, self.share, self.every, self.seed = n_vocab, share, every, seed
        self.tokens: list[int] = []
        self.masked = 0
        self._forced_at = -1

    def copy(self) -> Fickle:
        return Fickle(self.n_vocab, self.share, self.every, self.seed)

    def forced(self) -> list[int]:
        n = len(self.tokens)
        if n == self._forced_at or self._rng(self.tokens, "forced").randrange(self.every):
            return []
        rng = self._rng(self.tokens, "which")
        forced = [rng.randrange(FIRST, LAST) for _ in range(rng.randint(1, 4))]
        self.tokens += forced
        self._forced_at = len(self.tokens)
        return forced

    def accept(self, token: int) -> bool:
        ok = self._allows(self.tokens, token)
        if ok:
            self.tokens.append(token)
        return ok

    def mask(self) -> Mask:
        self.masked += 1
        return self._mask(self.tokens)

    def validate(self, tokens: Sequence[int]) -> int:
        so_far = list(self.tokens)
        for n, token in enumerate(tokens):
            if not self._allows(so_far, token):
                return n
            so_far.append(token)
        return len(tokens)

    def masks(self, draft: Sequence[int]) -> list[Bits]:
        assert self.validate(draft) == len(draft)
        self.masked += 1
        places = [[*self.tokens, *draft[:n]] for n in range(len(draft) + 1)]
        return [packed(self._mask(place)) for place in places]

    def _allows(self, tokens: list[int], token: int) -> bool:
        return bool(self._mask(tokens)[token])

    def _mask(self, tokens: list[int]) -> Mask:
        rng = np.random.default_rng([self.seed, *tokens[-4:], len(tokens)])
        bits = np.zeros(self.n_vocab, bool)
        bits[FIRST:LAST] = rng.random(LAST - FIRST) < self.share
        bits[rng.integers(FIRST, LAST, 3)] = True
        return bits

    def _rng(self, tokens: list[int], what: str) -> random.Random:
        return random.Random(f"{self.seed} {what} {tokens[-4:]} {len(tokens)}")
