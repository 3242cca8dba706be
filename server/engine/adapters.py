"""LoRA adapters of sequences: the salt that separates their prefixes, and their turns in steps.

llama.cpp applies the same adapters, at the same scales, to all tokens of a batch. So all sequences of a step
have the same adapters, and different sets of adapters take turns.
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
"""Maximum adapters of one request: llama.cpp's graphs have room for this many products in every matrix."""

TURN = 8
"""Steps of a turn while other adapters wait: a change of adapters plans all graphs anew."""


def salt_with(salt: str, adapters: Adapters, known: ListLike[AdapterSpec]) -> str:
    """The salt of prefixes that were read with adapters, which depends on their files' contents. Raises
    IndexError for an unknown adapter."""
    if not adapters:
        return salt
    made_by = [(known[index].fingerprint, scale) for index, scale in adapters]
    return hashlib.sha256(json.dumps([salt, made_by]).encode()).hexdigest()


class Turns:
    """Chooses the adapters of a step if running sequences have different ones: TURN steps each, then the ones
    that have waited longest."""

    def __init__(self) -> None:
        self._now: Adapters = ()
        self._left = self._steps = 0
        """Steps left of this turn, and all steps so far."""
        self._last: dict[Adapters, int] = {}
        """The last step of each, or the step at which it came."""

    def order(self, running: Iterable[Sequence]) -> list[Adapters]:
        """The adapters of all running sequences: those whose turn it is, then the next ones in order."""
        self._last = {
            adapters: self._last.get(adapters, self._steps)
            for adapters in dict.fromkeys(sequence.adapters for sequence in running)
        }
        if len(self._last) == 1:
            return [*self._last]
        mine = self._now if self._left > 0 else None
        return sorted(self._last, key=lambda adapters: (adapters != mine, self._last[adapters]))

    def took(self, adapters: Adapters) -> None:
        """Count a step with these adapters."""
        if adapters != self._now or self._left <= 0:
            self._now, self._left = adapters, TURN
        self._steps += 1
        self._left -= 1
        self._last[adapters] = self._steps
