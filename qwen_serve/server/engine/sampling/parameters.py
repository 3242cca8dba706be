"""A request's sampling parameters."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

MAX_LOGPROBS = 20
"""Maximum alternatives to a token with log-probabilities: OpenAI's limit, and vLLM's default."""

ALMOST_ZERO = 1e-5
"""Lower temperatures take the best token, as in vLLM: dividing by them would overflow."""

LARGEST = 1e9
"""Largest bias or penalty. A float32 logit stays finite with the sum of them, which samplers rely on."""

ON_ROWS = ("penalties", "dry")
"""Samplers that change the logits of seen tokens, applied before all others."""

SAMPLERS = (*ON_ROWS, "top_n_sigma", "top_k", "temperature", "typ_p", "top_p", "min_p", "xtc")
"""The default order of samplers, by llama.cpp's names: llama.cpp's order except for the temperature. It comes
before top-p and min-p, as in transformers and vLLM, since a checkpoint's sampling defaults assume that."""

LLAMA_CPP_SAMPLERS = (*ON_ROWS, "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
"""llama.cpp's own order (`common_params_sampling`)."""

BREAKERS = ("\n", ":", '"', "*")
"""llama.cpp's default sequence breakers of DRY."""


@dataclass(frozen=True)
class SamplingParams:
    """One request's parameters; the defaults are greedy. Raises ValueError, naming the field.

    `temperature` 0 takes the best token. `top_k` 0, `top_p` 1 and `min_p` 0 are off. Penalties apply as in
    transformers and vLLM, at any distance: `repetition_penalty` to tokens of the prompt and the output,
    `presence_penalty` and `frequency_penalty` to the output's only. With a `repeat_last_n` all three apply as
    in llama.cpp, to the last `repeat_last_n` tokens of prompt and output; -1 means all of them.

    The other samplers are llama.cpp's, by its names: `typical_p`, `top_n_sigma`, `xtc_probability` and
    `xtc_threshold`, `dynatemp_range` and `dynatemp_exponent`, the `dry_*` (with `dry_penalty_last_n` -1 for
    all tokens), `min_keep`. `samplers` is their order; a sampler that is not in it is not applied, and
    penalties and DRY come first. With `mirostat` 1 or 2 only the temperature is applied before it.

    With `ignore_eos` no end-of-generation token is chosen. The same `seed` gives the same output; without one
    each request draws its own. `logprobs` and `prompt_logprobs`, if not None, ask for the log-probabilities
    of each generated token and of each prompt token, with this number of likeliest alternatives.

    `logit_bias` is added to the logits of the tokens that it names. If `allowed_token_ids` is given, only
    those are chosen. The last token of one of `bad_words` is not chosen after all the tokens before it. No
    end-of-generation token is chosen before there are `min_tokens` tokens. `stop_token_ids` end a generation
    too; with `include_stop` such a token is part of the answer.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int | None = None
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = BREAKERS
    min_keep: int = 0
    samplers: tuple[str, ...] = SAMPLERS
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
        # logits are divided by it; within these bounds a float32 does not overflow
        require("repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "from 0.01 to 100")
        for field in ("presence_penalty", "frequency_penalty"):
            require(field, abs(getattr(self, field)) <= LARGEST, f"from -{LARGEST:g} to {LARGEST:g}")
        self._check_llama_cpp(require)
        for field in ("logprobs", "prompt_logprobs"):
            top = getattr(self, field)
            require(field, top is None or 0 <= top <= MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}")
        require("min_tokens", self.min_tokens >= 0, "0 or more")
        require("allowed_token_ids", self.allowed_token_ids != (), "at least one")
        require("bad_words", all(self.bad_words), "of at least one token each")
        usable = all(abs(bias) <= LARGEST or bias == -math.inf for _, bias in self.logit_bias)
        require("logit_bias", usable, f"numbers from -{LARGEST:g} to {LARGEST:g}, or -inf")

    def _check_llama_cpp(self, require: Callable[[str, bool, str], None]) -> None:
        require("repeat_last_n", self.repeat_last_n is None or self.repeat_last_n >= -1, "-1 (all) or more")
        for field in ("typical_p", "xtc_probability", "xtc_threshold"):
            require(field, 0 <= getattr(self, field) <= 1, "from 0 to 1")
        require("top_n_sigma", math.isfinite(self.top_n_sigma), "a finite number")
        for field in ("dynatemp_range", "dynatemp_exponent", "mirostat_tau", "mirostat_eta"):
            require(field, 0 <= getattr(self, field) < math.inf, "a number from 0")
        require("mirostat", self.mirostat in (0, 1, 2), "0 (off), 1 or 2")
        require("dry_multiplier", 0 <= self.dry_multiplier < math.inf, "0 (off) or more")
        require("dry_base", 1 <= self.dry_base < math.inf, "a number from 1")
        require("dry_allowed_length", self.dry_allowed_length >= 0, "0 or more")
        require("dry_penalty_last_n", self.dry_penalty_last_n >= -1, "-1 (all) or more")
        require("dry_sequence_breakers", all(self.dry_sequence_breakers), "strings that are not empty")
        require("min_keep", self.min_keep >= 0, "0 or more")
        known = set(SAMPLERS).issuperset(self.samplers) and len(set(self.samplers)) == len(self.samplers)
        require("samplers", known, f"some of {', '.join(SAMPLERS)}, each at most once")
        last = max((self.samplers.index(name) for name in ON_ROWS if name in self.samplers), default=-1)
        require("samplers", set(self.samplers[: last + 1]) <= set(ON_ROWS), "with penalties and dry first")

    @cached_property
    def on_rows(self) -> tuple[str, ...]:
        """Those of `ON_ROWS` that have an effect, in their order."""
        penalised = self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        wanted = {
            "penalties": bool(penalised) and self.repeat_last_n != 0,
            "dry": bool(self.dry_multiplier) and self.dry_penalty_last_n != 0,
        }
        return () if self.mirostat else tuple(name for name in self.samplers if wanted.get(name))

    @cached_property
    def chain(self) -> tuple[str, ...]:
        """The other samplers that have an effect, in their order."""
        if self.mirostat:
            return ("temperature", "mirostat")
        wanted = {
            "top_n_sigma": self.top_n_sigma > 0,
            "top_k": self.top_k > 0,
            "temperature": self.temperature != 1 or self.dynatemp_range > 0,
            "typ_p": self.typical_p < 1,
            "top_p": self.top_p < 1,
            "min_p": self.min_p > 0,
            "xtc": self.xtc_probability > 0 and self.xtc_threshold <= 0.5,
        }
        return tuple(name for name in self.samplers if wanted.get(name))

    @cached_property
    def is_greedy(self) -> bool:
        """Whether the choice is the best token, after penalties."""
        for name in self.chain:
            if name in ("typ_p", "xtc"):
                return False  # they may remove the best token
            cold = name == "temperature" and self.temperature < ALMOST_ZERO and not self.dynatemp_range
            if cold or (name == "top_k" and self.top_k == 1):
                return True
        return False
