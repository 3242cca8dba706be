"""Drafts copied from the text itself: what followed the last time that the newest tokens occurred.

Prompt lookup decoding (Saxena 2023), with the longest match as in suffix-tree drafters (SuffixDecoding,
Oliaro et al. 2024), found as in `suffixes.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .acceptance import Record
from .suffixes import LONGEST_COMPARED, SuffixIndex

if TYPE_CHECKING:
    from collections.abc import Sequence as ListLike

    import numpy as np
    import numpy.typing as npt

    from server.engine.sequence import Sequence

    from .base import Floors, Order
    from .pool import Pool


class NgramDrafter:
    """Keeps an index for every sequence it was asked about, and asks the pool where that finds less."""

    name = "ngram"

    def __init__(self, pool: Pool | None = None) -> None:
        self.experience = Record()
        """What the sequences that have ended tell about those to come."""
        self._pool = pool
        self._indexes: dict[Sequence, SuffixIndex] = {}

    def propose(self, orders: ListLike[Order], floors: Floors | None = None) -> None:
        """Fill in the orders; a text that repeats nothing gets no draft. Free, so there is no floor to it."""
        for order in orders:
            if order.limit <= 0:  # not worth an index of the whole prompt
                continue
            index = self._read(order.sequence)
            match, follows = index.match, index.continuation
            if self._pool is not None and match < LONGEST_COMPARED:
                pooled = self._pool.find(order.sequence.tokens)
                if pooled.match > match:
                    match, follows = pooled.match, pooled.continuation
            if match:
                order.tokens, order.match, order.drafter = follows(order.limit), match, self.name

    def read(self, sequences: ListLike[Sequence]) -> None:
        """Take in what they have gained, so that less is left to do when they are asked about."""
        for sequence in sequences:
            self._read(sequence)

    def _read(self, sequence: Sequence) -> SuffixIndex:
        if (index := self._indexes.get(sequence)) is None:
            index = self._indexes[sequence] = SuffixIndex(sequence.tokens)
        else:
            index.update()
        return index

    def chances(self, order: Order) -> npt.NDArray[np.float64]:
        """For each token drafted the chance that it is right if those before it are."""
        record = self._indexes[order.sequence].record
        return record.chances(order.match, len(order.tokens), self.experience)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended: its experience stays, and its text where there is a pool."""
        if (index := self._indexes.pop(sequence, None)) is None:
            return
        index.update()
        self.experience.merge(index.record)
        if self._pool is not None:
            self._pool.add(sequence.tokens)
