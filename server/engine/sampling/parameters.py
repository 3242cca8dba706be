"""What a request says about how its tokens are chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_LOGPROBS = 20
"""Most alternatives to a token whose log-probabilities are told: OpenAI's limit, and vLLM's unless set."""

ALMOST_ZERO = 1e-5
"""Temperatures below would only take logits to infinity: they stand for the best token, as in vLLM."""


@dataclass(frozen=True)
class SamplingParams:
    """One request's choices; the defaults are greedy. Raises ValueError, naming the field.

    `temperature` 0 takes the best token. `top_k` 0, `top_p` 1 and `min_p` 0 are off. Penalties see what
    transformers and vLLM let them see, at any distance: `repetition_penalty` the prompt and the output,
    `presence_penalty` and `frequency_penalty` the output only. (llama-server's look back 64 tokens.)
    With `ignore_eos` no end-of-generation token is ever chosen. The same `seed` gives the same output;
    without one every request draws its own. `logprobs` and `prompt_logprobs`, where not None, ask for the
    log-probabilities of each generated token and each token of the prompt, and for so many of the likeliest
    ones beside it.

    `logit_bias` is added to the logits of the tokens it names. Only `allowed_token_ids` are chosen, if given;
    of `bad_words`, token by token, the last token is not chosen where all before it were generated. No end of
    a generation is chosen before there are `min_tokens` tokens. `stop_token_ids` end a generation as well;
    with `include_stop` such a token is a part of the answer.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False

    def __post_init__(self) -> None:
        def require(field: str, ok: bool, wanted: str) -> None:
            if not ok:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be {wanted}")

        require("temperature", 0 <= self.temperature < math.inf, "a number from 0")
        require("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        require("top_k", self.top_k >= 0, "0 (off) or more")
        require("min_p", 0 <= self.min_p <= 1, "from 0 to 1")
        # far from where a float32 overflows: a logit is divided by it
        require("repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "from 0.01 to 100")
        require("presence_penalty", math.isfinite(self.presence_penalty), "a finite number")
        require("frequency_penalty", math.isfinite(self.frequency_penalty), "a finite number")
        for field in ("logprobs", "prompt_logprobs"):
            top = getattr(self, field)
            require(field, top is None or 0 <= top <= MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}")
        require("min_tokens", self.min_tokens >= 0, "0 or more")
        require("allowed_token_ids", self.allowed_token_ids != (), "at least one")
        require("bad_words", all(self.bad_words), "of at least one token each")
        require("logit_bias", all(bias < math.inf for _, bias in self.logit_bias), "numbers below infinity")

    @property
    def is_greedy(self) -> bool:
        """Whether the choice is the best token, after penalties."""
        return self.temperature < ALMOST_ZERO or self.top_k == 1
