"""What has been read before, kept or not: it tells what a cache without a budget would have saved."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence as ListLike

BLOCK = 16
"""Tokens from one hash to the next."""

LIMIT = 1 << 16
"""Beginnings that are remembered, the latest: of a million tokens, in some ten megabytes."""


class ShadowIndex:
    """The beginnings of texts, as hashes of every `BLOCK` tokens and of all before them.

    Block hashes are how vLLM finds cached prefixes; here nothing is found by them but how long they are.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._hashes: dict[int, None] = {}  # the least recently read first

    def read(self, tokens: ListLike[int], salt: str = "") -> int:
        """Remember a text, apart from those with another `salt`.

        Returns with how many tokens, in whole blocks, it begins as another did.
        """
        text = np.asarray(tokens, np.int32).tobytes()
        known, new, chain, size = 0, False, hash(salt), 4 * BLOCK
        for end in range(size, len(text) + 1, size):
            chain = hash((chain, text[end - size : end]))
            new = new or chain not in self._hashes
            known += 0 if new else BLOCK
            self._hashes.pop(chain, None)
            self._hashes[chain] = None
        while len(self._hashes) > self._limit:
            del self._hashes[next(iter(self._hashes))]
        return known
