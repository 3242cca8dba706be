"""Log-probabilities of a request's tokens, if it asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from qwen_serve.llamacpp.row_results import TokenLogprobs

if TYPE_CHECKING:
    import numpy.typing as npt

    from .parameters import SamplingParams


class Logprobs:
    """Log-probabilities of one request. The engine's thread adds them, the listener reads them.

    They are those of the model's own distribution, the softmax over the whole row of logits, before
    temperature, penalties and bans, as in transformers and vLLM (`raw_logprobs`). Ranks and `best` exclude
    tokens that only pad the vocabulary.
    """

    def __init__(self, params: SamplingParams, n_real: int) -> None:
        self._n_real = n_real
        self._n_top, self._n_prompt_top = params.logprobs, params.prompt_logprobs
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

    def add(self, logits: npt.NDArray[np.float32], token: int) -> None:
        """Add a `token` that was generated from a row of logits [n_vocab]."""
        self.tokens.append(self._of(logits, token, self.n_top))

    def add_prompt(self, logits: npt.NDArray[np.float32], token: int) -> None:
        """Add the prompt's `token` that follows a row of logits [n_vocab]."""
        self.prompt.append(self._of(logits, token, self.n_prompt_top))

    def _of(self, logits: npt.NDArray[np.float32], token: int, n_top: int) -> TokenLogprobs:
        logprobs = log_softmax(logits)[: self._n_real]
        likeliest = best_of(logprobs, n_top) if n_top else np.zeros(0, np.intp)
        order = likeliest[np.lexsort((likeliest, -logprobs[likeliest]))]
        logprob, ids = logprobs[token], np.arange(len(logprobs))
        before = (logprobs > logprob) | ((logprobs == logprob) & (ids < token))
        rank = 1 + int(np.count_nonzero(before))
        return TokenLogprobs(token, float(logprob), rank, order.astype(np.int32), logprobs[order])

    def keep(self, generated: int) -> None:
        """Keep the first `generated` tokens: later ones of the last step are not in the answer."""
        del self.tokens[generated:]


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Log-softmax of a row [n_vocab], which is not changed. Raises FloatingPointError if it is unusable."""
    highest = logits.max()
    if not np.isfinite(highest):
        raise FloatingPointError(f"the best of {logits.size} logits is {highest}")
    result: npt.NDArray[np.float32] = logits - highest
    result -= np.log(np.exp(result).sum())
    return result


def best_of(logits: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.intp]:
    """Ids of the `k` highest of many logits [n], unordered; all of them if there are no more.
    Of equal ones the lowest ids count.

    The logits are cut into blocks. At least k logits reach the k-th highest of the blocks' maxima, and few
    exceed it. Finding this bound reads every logit once, while a partial sort would move them.
    """
    width = 256
    n_blocks = len(logits) // width
    if k >= len(logits):
        return np.arange(len(logits))
    ids = np.arange(len(logits))
    if n_blocks > 4 * k:
        maxima = logits[: n_blocks * width].reshape(n_blocks, width).max(axis=1)
        ids = np.flatnonzero(logits >= np.partition(maxima, -k)[-k])
    if len(ids) <= k:
        return ids
    few = logits[ids]
    least = np.partition(few, -k)[-k]
    above = ids[few > least]
    return np.concatenate([above, ids[few == least][: k - len(above)]])
