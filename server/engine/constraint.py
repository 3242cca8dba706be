"""What may come next in an answer, where its request has a say in that: a grammar, a budget for reasoning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

Bitmask = bytes
"""A bit for each token, the lowest of a byte first: 1 where the token may come next."""


class Constraint(Protocol):
    """Follows one answer token by token. The engine's thread only, once the request is submitted.

    It belongs to the request's `Sampler`, and so outlives a preemption. A token that was accepted is never
    taken back: of a draft, only what was chosen is accepted.
    """

    def forced(self) -> list[int]:
        """The tokens that must come next whatever the model says, if there are any; they are accepted.

        Asked at the beginning and after every accepted token. The last may end the generation.
        """

    def accept(self, token: int) -> bool:
        """Whether `token` may come next; if so, it has. Raises whatever keeps the answer from going on."""

    def mask(self) -> Bitmask | None:
        """Which tokens may come next, at least one; None where all may."""

    def validate(self, tokens: Sequence[int]) -> int:
        """How many of the tokens of a draft may come next, one after the other."""


def all_allowed(mask: Bitmask, n: int) -> npt.NDArray[np.intp]:
    """All of the first `n` tokens that may come next, in order."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=n, bitorder="little")
    return np.flatnonzero(bits.view(bool))  # of numbers it takes twice as long


def count(mask: Bitmask) -> int:
    """How many tokens may come next."""
    return int.from_bytes(mask, "little").bit_count()
