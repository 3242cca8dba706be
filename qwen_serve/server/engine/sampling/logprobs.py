"""Log-probabilities of a request's tokens, if it asks for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qwen_serve.llamacpp import DeviceSampler

from .candidates import best_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from qwen_serve.llamacpp import Rows
    from qwen_serve.llamacpp.row_sampler import RowResult

    from .parameters import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs:
    """Natural logarithms of probabilities at one place of a text."""

    token: int
    """The token at this place."""
    logprob: float
    rank: int
    """1 for the likeliest token; of equally likely ones the lowest id comes first."""
    best: npt.NDArray[np.int32]
    """The likeliest tokens at this place, best first."""
    best_logprobs: npt.NDArray[np.float32]
    """Their log-probabilities. These are arrays because pairs would take ten times the memory, and ten times
    as long to free."""

    @property
    def top(self) -> list[tuple[int, float]]:
        """The likeliest tokens and their log-probabilities, best first."""
        return list(zip(self.best.tolist(), self.best_logprobs.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of tokens at one place. No other token has one as high as those that are listed."""

    ids: npt.NDArray[np.int32] | None
    """The tokens; None for the whole vocabulary, in order."""
    logprobs: npt.NDArray[np.float32]

    def of(self, token: int, n_top: int, n_real: int) -> TokenLogprobs:
        """The result for a token, which must be among them. Only the first `n_real` tokens count."""
        if self.ids is None:
            logprobs, ids = self.logprobs[:n_real], np.arange(n_real, dtype=np.int32)
            likeliest = best_of(logprobs, n_top) if n_top else ids[:0]
            logprob = logprobs[token]
        else:
            logprobs, ids = self.logprobs, self.ids
            likeliest = np.arange(len(ids))
            logprob = logprobs[ids == token][0]
        best, best_ids = logprobs[likeliest], ids[likeliest]
        order = np.lexsort((best_ids, -best))[:n_top]  # among equally likely ones the lowest id first
        before = (logprobs > logprob) | ((logprobs == logprob) & (ids < token))
        rank = 1 + int(np.count_nonzero(before))
        return TokenLogprobs(token, float(logprob), rank, best_ids[order], best[order])


class Logprobs:
    """Log-probabilities of one request. The engine's thread adds them, the listener reads them.

    They are those of the model's own distribution, the softmax over the whole row of logits, before
    temperature, penalties and bans, as in transformers and vLLM (`raw_logprobs`). Ranks and `best` exclude
    tokens that only pad the vocabulary.
    """

    def __init__(self, params: SamplingParams, n_real: int) -> None:
        self._n_real = n_real
        self._n_top, self._n_prompt_top = params.logprobs, params.prompt_logprobs
        self._n_above = max(self._n_top or 0, 1 if params.is_greedy else params.top_k)
        """Candidates that must be above the others: those that are listed or drawn."""
        self.tokens: list[TokenLogprobs] = []
        """One for each generated token, in order. If a token ended the answer without being part of it
        (`stop`), the last one belongs to that token."""
        self.prompt: list[TokenLogprobs] = []
        """One for each prompt token from the second on; the first has none."""

    @classmethod
    def wanted(cls, params: SamplingParams, n_real: int) -> Logprobs | None:
        """A new object for a request with these parameters; None if it requests no log-probabilities."""
        asked = params.logprobs is not None or params.prompt_logprobs is not None
        return cls(params, n_real) if asked else None

    @property
    def of_prompt(self) -> bool:
        """Whether those of the prompt are wanted. Then each of its tokens must be computed and needs a
        row."""
        return self._n_prompt_top is not None

    @property
    def of_answer(self) -> bool:
        """Whether those of generated tokens are wanted."""
        return self._n_top is not None

    @property
    def n_top(self) -> int:
        """How many of the likeliest tokens belong to each generated token; -1 if no log-probabilities do."""
        return -1 if self._n_top is None else self._n_top

    @property
    def n_prompt_top(self) -> int:
        """The same of the prompt's tokens."""
        return -1 if self._n_prompt_top is None else self._n_prompt_top

    def scores(self, rows: Rows, row: int) -> Scores:
        """The scores of a decoded row, whose device sampler is LOGPROBS or ROW. Raises FloatingPointError if
        its logits are unusable, LlamaError if a whole row cannot be had."""
        if rows.kinds[row] is DeviceSampler.ROW:
            return Scores(None, log_softmax(rows.logits(row)))
        ids, logits = rows.candidates(row)
        if np.count_nonzero(logits > logits.min()) < self._n_above:
            # the lowest ones may equal others that are not among them, and the order depends on all of these
            return Scores(None, log_softmax(rows.fetch(row)))
        return Scores(ids.copy(), logits - np.float32(rows.log_sum(row)))

    def add(self, scores: Scores, token: int) -> None:
        """Add a `token` that was generated from a row with these scores. It must be among them."""
        assert self._n_top is not None
        self.tokens.append(scores.of(token, self._n_top, self._n_real))

    def add_prompt(self, logits: npt.NDArray[np.float32], token: int) -> None:
        """Add the prompt's `token` that follows a row of logits [n_vocab]."""
        assert self._n_prompt_top is not None
        scores = Scores(None, log_softmax(logits))
        self.prompt.append(scores.of(token, self._n_prompt_top, self._n_real))

    def keep(self, generated: int) -> None:
        """Keep the first `generated` tokens: later ones of the last step are not in the answer."""
        del self.tokens[generated:]


def of_result(result: RowResult) -> TokenLogprobs:
    """Of a row that `RowSampler` sampled or scored."""
    return TokenLogprobs(result.token, result.logprob, result.rank, result.best, result.best_logprobs)


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Log-softmax of a row [n_vocab], which is not changed. Raises FloatingPointError if it is unusable."""
    highest = logits.max()
    if not np.isfinite(highest):
        raise FloatingPointError(f"the best of {logits.size} logits is {highest}")
    result: npt.NDArray[np.float32] = logits - highest
    result -= np.log(np.exp(result).sum())
    return result
