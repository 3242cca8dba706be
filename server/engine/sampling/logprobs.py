"""How likely the model took the tokens of a text to be: what a request asked to be told beside its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qwen_serve.llamacpp import DeviceSampler

from .candidates import best_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from qwen_serve.llamacpp import Rows

    from .parameters import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs:
    """Natural logarithms of probabilities at one place of a text."""

    token: int
    """The one that is there."""
    logprob: float
    rank: int
    """1 where no token is likelier, 2 where one is."""
    best: npt.NDArray[np.int32]
    """The likeliest tokens at this place, best first."""
    best_logprobs: npt.NDArray[np.float32]
    """Theirs. Arrays: pairs would take ten times the memory, and that much longer to be freed."""

    @property
    def top(self) -> list[tuple[int, float]]:
        """The likeliest tokens and theirs, best first."""
        return list(zip(self.best.tolist(), self.best_logprobs.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of tokens at one place; every other token has at most the least of theirs."""

    ids: npt.NDArray[np.int32] | None
    """The tokens; None for those of the whole vocabulary, in order."""
    logprobs: npt.NDArray[np.float32]

    def of(self, token: int, n_top: int, n_real: int) -> TokenLogprobs:
        """What is told of a token, which must be among them. The first `n_real` of the vocabulary count."""
        if self.ids is None:
            logprobs = self.logprobs[:n_real]
            logprob = logprobs[token]
            ids = (best_of(logprobs, n_top) if n_top else np.arange(0)).astype(np.int32)
            best = logprobs[ids]
        else:
            logprobs, ids, best = self.logprobs, self.ids, self.logprobs
            logprob = logprobs[ids == token][0]
        order = np.lexsort((ids, -best))[:n_top]  # of several as likely the lowest first, as everywhere
        rank = 1 + int(np.count_nonzero(logprobs > logprob))
        return TokenLogprobs(token, float(logprob), rank, ids[order], best[order])


class Logprobs:
    """Of one request, as they become known. The engine's thread writes, the listener reads.

    They are of the model's own distribution, the softmax over the whole row of logits, as transformers and
    vLLM (`raw_logprobs`) have them: before temperature, penalties and whatever bans tokens. Ranks, and the
    `best`, leave out tokens that only pad the vocabulary.
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

    def scores(self, rows: Rows, row: int) -> Scores:
        """What a row of what was decoded says, whose device sampler gives LOGPROBS or ROW. Raises
        FloatingPointError where it holds no usable logits."""
        if rows.kinds[row] is DeviceSampler.ROW:
            return Scores(None, log_softmax(rows.logits(row)))
        ids, logits = rows.candidates(row)
        return Scores(ids.copy(), logits - np.float32(rows.log_sum(row)))

    def add(self, scores: Scores, token: int) -> None:
        """`token` was generated from a row with these scores, and must be among them."""
        assert self._n_top is not None
        self.tokens.append(scores.of(token, self._n_top, self._n_real))

    def add_prompt(self, logits: npt.NDArray[np.float32], token: int) -> None:
        """`token` is the next of the prompt, after a row of logits [n_vocab]."""
        assert self._n_prompt_top is not None
        scores = Scores(None, log_softmax(logits))
        self.prompt.append(scores.of(token, self._n_prompt_top, self._n_real))

    def keep(self, generated: int) -> None:
        """Of what was generated in the last step only so much is a part of the answer, or ends it."""
        del self.tokens[generated:]


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Of a row [n_vocab], which stays as it is. Raises FloatingPointError where it holds no usable logits."""
    highest = logits.max()
    if not np.isfinite(highest):
        raise FloatingPointError(f"the best of {logits.size} logits is {highest}")
    result: npt.NDArray[np.float32] = logits - highest
    result -= np.log(np.exp(result).sum())
    return result
