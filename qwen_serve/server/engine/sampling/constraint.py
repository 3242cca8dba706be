"""The protocol of constraints, which restrict the next token of an answer, such as a grammar."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from qwen_serve.llamacpp.row_sampler import Bits

Mask = npt.NDArray[np.bool_]
"""Whether each token of the vocabulary may come next; it may have some more ids at its end."""


class Constraint(Protocol):
    """Follows one answer token by token. Engine's thread only, once the request is submitted.

    It belongs to the request's `Sampler`, so it survives a preemption. An accepted token is never taken back,
    since only the chosen tokens of a draft are accepted.
    """

    def forced(self) -> list[int]:
        """Accept and return the tokens that must come next regardless of the model, if there are any.

        Called at the beginning and after every accepted token. The last one may end the generation.
        """

    def accept(self, token: int) -> bool:
        """Accept `token` if it may come next; return whether it may. Raises if the answer cannot go on."""

    def mask(self) -> Mask:
        """The tokens that may come next, at least one. The caller may change the array."""

    def validate(self, tokens: Sequence[int]) -> int:
        """How many tokens of a draft may come next, one after the other."""

    def masks(self, draft: Sequence[int]) -> list[Bits]:
        """The masks for the next token and, as far as it is valid, for those after each token of a draft."""
