"""LoRA adapters of sequences: what parts their prefixes from others', and whose turn it is in a step.

llama.cpp applies the same adapters, at the same scales, to all tokens of a batch. So a step is of sequences
that have the same ones, and those with others take turns.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as ListLike

    from .planning.adapters import AdapterSpec
    from .sequence import Adapters, Sequence

MOST = 4
"""Adapters of one request: llama.cpp's graphs have room for the products of so many in every matrix."""

TURN = 8
"""Steps of a turn while others wait: to change adapters costs a planning of graphs."""


def salt_with(salt: str, adapters: Adapters, known: ListLike[AdapterSpec]) -> str:
    """The salt of prefixes that were read with adapters, by what is in their files. Raises IndexError for one
    that there is not."""
    if not adapters:
        return salt
    made_by = [(known[index].fingerprint, scale) for index, scale in adapters]
    return hashlib.sha256(json.dumps([salt, made_by]).encode()).hexdigest()


class Turns:
    """Which adapters a step has, where running sequences have several: TURN steps each, and then whoever has
    waited longest."""

    def __init__(self) -> None:
        self._now: Adapters = ()
        self._left = self._steps = 0
        """Steps of this turn, and all so far."""
        self._last: dict[Adapters, int] = {}
        """The last step of each, or the one at which it came."""

    def order(self, running: Iterable[Sequence]) -> list[Adapters]:
        """Whose turn it is, and who is next if they have nothing that fits; the adapters of all that run."""
        self._last = {
            adapters: self._last.get(adapters, self._steps)
            for adapters in dict.fromkeys(sequence.adapters for sequence in running)
        }
        if len(self._last) == 1:
            return [*self._last]
        mine = self._now if self._left > 0 else None
        return sorted(self._last, key=lambda adapters: (adapters != mine, self._last[adapters]))

    def took(self, adapters: Adapters) -> None:
        """A step is theirs."""
        if adapters != self._now or self._left <= 0:
            self._now, self._left = adapters, TURN
        self._steps += 1
        self._left -= 1
        self._last[adapters] = self._steps
