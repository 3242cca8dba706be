"""Remembers which prefixes were read before, to show what an unlimited cache would have saved."""

from collections.abc import Sequence

import numpy as np

BLOCK = 16
"""Tokens from one hash to the next."""

LIMIT = 1 << 16
"""Hashes that are kept, the latest ones: they cover a million tokens, in some ten megabytes."""


class ShadowIndex:
    """Prefixes of texts, as a chain of hashes: each covers `BLOCK` tokens and all before them.

    vLLM finds cached prefixes by such block hashes; here they only tell how long a known prefix is.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._hashes: dict[int, None] = {}  # the least recently read first

    def read(self, tokens: Sequence[int], salt: str = "") -> int:
        """Remember a text; texts with another `salt` are separate.

        Returns the length of its known prefix, in tokens of whole blocks.
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
