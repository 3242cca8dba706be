"""Log-probabilities of a request's tokens, if it asks for them."""

from __future__ import annotations

from qwen_serve.llamacpp.row_results import TokenLogprobs

from .parameters import SamplingParams


class Logprobs:
    """Log-probabilities of one request. The engine's thread adds them, the listener reads them.

    They are those of the model's own distribution, the softmax over the whole row of logits, before
    temperature, penalties and bans, as in transformers and vLLM (`raw_logprobs`). Ranks and `best` exclude
    tokens that only pad the vocabulary.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._n_top, self._n_prompt_top = params.logprobs, params.prompt_logprobs
        self.tokens: list[TokenLogprobs] = []
        """One for each generated token, in order. If a token ended the answer without being part of it
        (`stop`), the last one belongs to that token."""
        self.prompt: list[TokenLogprobs] = []
        """One for each prompt token from the second on; the first has none."""

    @classmethod
    def wanted(cls, params: SamplingParams) -> Logprobs | None:
        """A new object for a request with these parameters; None if it requests no log-probabilities."""
        asked = params.logprobs is not None or params.prompt_logprobs is not None
        return cls(params) if asked else None

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

    def keep(self, generated: int) -> None:
        """Keep the first `generated` tokens: later ones of the last step are not in the answer."""
        del self.tokens[generated:]
