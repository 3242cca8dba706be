"""How likely the model took the tokens of a text to be: what a request asked to be told beside its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .sampling import best_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from .sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities at one place of a text."""

    token: int
    """The one that is there."""
    logprob: float
    rank: int
    """1 where no token is likelier, 2 where one is."""
    top: list[tuple[int, float]]
    """The likeliest tokens at this place and theirs, best first."""


class Logprobs:
    """Of one request, as they become known. The engine's thread writes, the listener reads.

    They are of the model's own distribution, the softmax over the whole row of logits, as transformers and
    vLLM (`raw_logprobs`) have them: before temperature, penalties and whatever bans tokens. Among the `top`
    there is no token that only pads the vocabulary.
    """

    def __init__(self, params: SamplingParams, n_real: int) -> None:
        self._n_real = n_real
        self._n_top, self._n_prompt_top = params.logprobs, params.prompt_logprobs
        self.tokens: list[TokenLogprobs] = []
        """Of each generated token, in order. Where the answer has ended with a token that is not a part of it
        (`stop`), that is the last one."""
        self.prompt: list[TokenLogprobs] = []
        """Of the tokens of the prompt from the second on: nothing is known of the first."""

    @classmethod
    def wanted(cls, params: SamplingParams, n_real: int) -> Logprobs | None:
        """What a request with these parameters wants to know; None if nothing."""
        asked = params.logprobs is not None or params.prompt_logprobs is not None
        return cls(params, n_real) if asked else None

    @property
    def of_prompt(self) -> bool:
        """Whether the prompt's are wanted: then each of its tokens has to be read, and leaves a row."""
        return self._n_prompt_top is not None

    @property
    def of_answer(self) -> bool:
        """Whether those of what is generated are wanted."""
        return self._n_top is not None

    def add(self, row: npt.NDArray[np.float32], token: int) -> None:
        """`token` was generated from a row of log-probabilities [n_vocab]."""
        assert self._n_top is not None
        self.tokens.append(self._at(row, token, self._n_top))

    def add_prompt(self, row: npt.NDArray[np.float32], token: int) -> None:
        """`token` is the next of the prompt."""
        assert self._n_prompt_top is not None
        self.prompt.append(self._at(row, token, self._n_prompt_top))

    def keep(self, generated: int) -> None:
        """Of what was generated in the last step only so much is a part of the answer, or ends it."""
        del self.tokens[generated:]

    def _at(self, row: npt.NDArray[np.float32], token: int, n_top: int) -> TokenLogprobs:
        logprob = row[token]
        top: list[tuple[int, float]] = []
        if n_top:
            ids = best_of(row[: self._n_real], n_top)
            values = row[ids]
            order = np.lexsort((ids, -values))  # of several as likely the lowest first, as everywhere
            top = list(zip(ids[order].tolist(), values[order].tolist(), strict=True))
        return TokenLogprobs(token, float(logprob), 1 + int(np.count_nonzero(row > logprob)), top)


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Of a row [n_vocab], which stays as it is. Raises FloatingPointError where it holds no usable logits."""
    highest = logits.max()
    if not np.isfinite(highest):
        raise FloatingPointError(f"the best of {logits.size} logits is {highest}")
    result: npt.NDArray[np.float32] = logits - highest
    result -= np.log(np.exp(result).sum())
    return result
