"""LoRA adapters of sequences: the salt that separates their prefixes, and their turns in steps.

llama.cpp applies the same adapters, at the same scales, to all tokens of a batch. So all sequences of a step
have the same adapters, and different sets of adapters take turns.
"""

import hashlib
import json
from collections.abc import Sequence

from .batch import Batch
from .planning.adapters import AdapterSpec
from .request import Adapters, Request, is_private

MOST = 4
"""Maximum adapters of one request: llama.cpp's graphs have room for this many products in every matrix."""

TURN = 8
"""Steps of a turn while other adapters wait. A change of adapters plans all graphs again."""


def salt_with(salt: str, adapters: Adapters, known: Sequence[AdapterSpec]) -> str:
    """The salt of prefixes that are computed with these adapters; it depends on the contents of their files.
    Raises IndexError for an unknown adapter."""
    if not adapters or is_private(salt):  # nobody else has a private one
        return salt
    made_by = [(known[index].fingerprint, scale) for index, scale in adapters]
    return hashlib.sha256(json.dumps([salt, made_by]).encode()).hexdigest()


class AdapterRotation:
    """Chooses the adapters of a step if running sequences have different ones, in turns of TURN steps.

    The next turn goes to the tenant that has waited longest, and among its sets to the one that has waited
    longest. So a tenant with many sets, or many scales, gets no more turns than one with a single set.
    """

    def __init__(self) -> None:
        self._now: Adapters = ()
        self._left = self._steps = 0
        """Steps left of this turn, and all steps so far."""
        self._sets: dict[Adapters, int] = {}
        """The last step of each set or, before its first turn, the step at which it arrived."""
        self._tenants: dict[str, int] = {}
        """The same for each tenant."""

    def order(self, running: Sequence[Request]) -> list[Adapters]:
        """The sets of all running sequences: the one whose turn it is, then the others in the order of their
        turns."""
        steps = self._steps
        self._sets = {
            key: self._sets.get(key, steps) for key in dict.fromkeys(one.adapters for one in running)
        }
        if len(self._sets) < 2:
            self._tenants.clear()
            return [*self._sets]
        tenants = dict.fromkeys(one.scheduling.tenant for one in running)
        self._tenants = {name: self._tenants.get(name, steps) for name in tenants}
        waited = dict.fromkeys(self._sets, steps)
        for one in running:
            waited[one.adapters] = min(waited[one.adapters], self._tenants[one.scheduling.tenant])
        mine = self._now if self._left > 0 else None
        return sorted(
            self._sets, key=lambda adapters: (adapters != mine, waited[adapters], self._sets[adapters])
        )

    def took(self, batch: Batch) -> None:
        """Count a step."""
        if batch.adapters != self._now or self._left <= 0:
            self._now, self._left = batch.adapters, TURN
        self._steps += 1
        self._left -= 1
        self._sets[batch.adapters] = self._steps
        if len(self._sets) > 1:
            self._tenants.update((chunk.sequence.scheduling.tenant, self._steps) for chunk in batch.chunks)
