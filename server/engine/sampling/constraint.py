"""What may come next in an answer, where its request has a say in that: a grammar, a budget for reasoning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

Mask = npt.NDArray[np.bool_]
"""For each token of the vocabulary, perhaps for some more, whether it may come next."""


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

    def mask(self) -> Mask:
        """Which tokens may come next, at least one. It is the caller's to change."""

    def validate(self, tokens: Sequence[int]) -> int:
        """How many of the tokens of a draft may come next, one after the other."""

    def prepare(self, draft: Sequence[int]) -> None:
        """While the device computes: make ready the masks of this place and of those after a valid draft's
        tokens, which `mask` may be asked for next."""
