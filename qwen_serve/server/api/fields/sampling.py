"""Request fields -> SamplingParams; the model's own values replace those that a request omits."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from qwen_serve.server.api.errors import bad_request
from qwen_serve.server.engine import SAMPLERS, SamplingParams, Vocab

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

MAX_TOKEN_RULES = 16_384
"""Most tokens that a field names. Each answer loops over them when it begins, which takes a few
milliseconds."""

MAX_WORDS = 1024
MAX_WORD_CHARACTERS = 16_384
"""Most characters of `bad_words`. All clients wait while these are tokenized: up to 10 ms."""

MAX_BREAKERS = 32
"""Most sequence breakers for DRY. For each new one, every token of the vocabulary is searched."""

LEAST_TOP_P = 1e-6
"""Stands for a top-p of 0, the likeliest token."""

Mode = Literal["text", "instruct", "thinking"]
""" "text" continues a text. A chat's reply begins with the answer ("instruct") or with reasoning
("thinking")."""

Source = Literal["file", "card", "card-coding"]
"""Source of the values that requests omit."""

THINKING = SamplingParams(temperature=1.0, top_p=0.95, top_k=20, presence_penalty=1.5)
THINKING_CODING = SamplingParams(temperature=0.6, top_p=0.95, top_k=20)
INSTRUCT = SamplingParams(temperature=0.7, top_p=0.8, top_k=20, presence_penalty=1.5)
"""From the model card of Qwen3.5 (4B and others), "Best Practices": thinking in general, thinking for precise
coding tasks, and the instruct mode for general tasks."""


@dataclass(frozen=True)
class SamplingDefaults:
    """Default values by mode."""

    text: SamplingParams
    instruct: SamplingParams
    thinking: SamplingParams

    def of(self, mode: Mode) -> SamplingParams:
        """The values of a mode."""
        found: SamplingParams = getattr(self, mode)
        return found


def sampling_defaults(
    metadata: Mapping[str, str], *, greedy: bool, source: Source = "file"
) -> SamplingDefaults:
    """The model's own values: from its file or, for chats, from its card; with `greedy`, temperature 0.

    Raises ValueError for a value in the file that is out of range.
    """
    text = instruct = thinking = from_file(metadata)
    if source != "file":
        instruct, thinking = INSTRUCT, THINKING_CODING if source == "card-coding" else THINKING
    modes = (text, instruct, thinking)
    return SamplingDefaults(*(replace(mode, temperature=0.0) if greedy else mode for mode in modes))


def from_file(metadata: Mapping[str, str]) -> SamplingParams:
    """`general.sampling.*`, llama.cpp's LLM_KV_GENERAL_SAMPLING_*. Raises ValueError."""

    def number(key: str, neutral: float) -> float:
        return float(metadata.get(f"general.sampling.{key}", neutral))

    last_n = metadata.get("general.sampling.penalty_last_n")
    try:
        return SamplingParams(
            temperature=number("temp", 0.0),
            top_p=number("top_p", 1.0),
            top_k=max(0, int(number("top_k", 0))),
            min_p=number("min_p", 0.0),
            repetition_penalty=number("penalty_repeat", 1.0),
            repeat_last_n=None if last_n is None else int(last_n),
            xtc_probability=number("xtc_probability", 0.0),
            xtc_threshold=number("xtc_threshold", 0.1),
            mirostat=int(number("mirostat", 0)),
            mirostat_tau=number("mirostat_tau", 5.0),
            mirostat_eta=number("mirostat_eta", 0.1),
        )
    except (ValueError, OverflowError) as error:
        raise ValueError(f"the GGUF's general.sampling.* cannot be used: {error}") from error


def _logit_bias(value: Any) -> dict[int, float]:
    """OpenAI's object by token id, or llama-server's list of pairs, where false bans a token."""
    pairs = list(value.items()) if isinstance(value, dict) else [] if value is None else value
    if isinstance(pairs, list) and len(pairs) > MAX_TOKEN_RULES:
        raise ValueError(f"must be at most {MAX_TOKEN_RULES:,} tokens")
    if not isinstance(pairs, list) or not all(isinstance(pair, list | tuple) for pair in pairs):
        raise ValueError("must be an object of token ids and numbers")
    found: dict[int, float] = {}
    for pair in pairs:
        token, bias = pair if len(pair) == 2 else (None, None)
        if isinstance(token, str) and token.isascii() and token.isdecimal() and len(token) < 10:
            token = int(token)
        if not isinstance(token, int) or isinstance(token, bool):
            raise ValueError(f"{str(token)[:40]!r} is not a token's id; texts are not taken apart here")
        if bias is False and not isinstance(value, dict):
            bias = -math.inf
        elif not isinstance(bias, int | float) or isinstance(bias, bool) or not -100 <= bias <= 100:
            raise ValueError(f"the bias of {token} must be a number from -100 to 100")
        found[token] = float(bias)
    return found


def _words(value: Any) -> list[str]:
    words = [] if value is None else value
    if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
        raise ValueError("must be a list of strings, none of them empty")
    if len(words) > MAX_WORDS or sum(map(len, words)) > MAX_WORD_CHARACTERS:
        raise ValueError(
            f"must be at most {MAX_WORDS:,} strings of {MAX_WORD_CHARACTERS:,} characters together"
        )
    return words


SAMPLER_LETTERS = {**dict(zip("edsktypmx", SAMPLERS, strict=True)), "a": ""}
SAMPLER_NAMES = {
    **{name.replace("_", ""): name for name in SAMPLERS},
    "nucleus": "top_p",
    "temp": "temperature",
    "typ": "typ_p",
    "typicalp": "typ_p",
    "adaptivep": "",
}
"""llama-server's names without underscores and hyphens. Adaptive-p is accepted because clients list it.
Without an `adaptive_target` it is only the final draw, which happens in any case."""


def _samplers(value: Any) -> tuple[str, ...] | None:
    """llama-server's list of names, or string of letters."""
    if value is None:
        return None
    given, known = (value, SAMPLER_LETTERS) if isinstance(value, str) else (value, SAMPLER_NAMES)
    if not isinstance(given, str | list) or not all(isinstance(name, str) for name in given):
        raise ValueError("must be a list of names, or a string of letters")
    found = []
    for name in given:
        plain = name.lower().replace("-", "").replace("_", "")
        if plain not in known:
            raise ValueError(f"{name[:40]!r} is none of {', '.join(SAMPLERS)}")
        found += [known[plain]] if known[plain] else []
    return SamplingParams(samplers=tuple(found)).samplers  # the constructor may reorder them


def _dry_base(value: Any) -> Any:
    """llama-server replaces values below 1 with its default."""
    return None if isinstance(value, int | float) and value < 1 else value


def _breakers(value: Any) -> list[str] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise ValueError("must be a list of strings, at least one and none of them empty")
    if len(value) > MAX_BREAKERS or max(map(len, value)) > 40:
        raise ValueError(f"must be at most {MAX_BREAKERS} strings of 40 characters each")
    return value


TokenIds = Annotated[list[int], Field(fail_fast=True, max_length=MAX_TOKEN_RULES)]


LLAMA_CPP = (
    *("repeat_last_n", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold", "dynatemp_range"),
    *("dynatemp_exponent", "mirostat", "mirostat_tau", "mirostat_eta", "dry_multiplier", "dry_base"),
    *("dry_allowed_length", "dry_penalty_last_n", "min_keep", "samplers"),
)
"""Fields of llama-server with the same names in `SamplingParams`."""


class SamplingFields(BaseModel):
    """How to choose tokens, and from which."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=INT32_MAX)
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, ge=0.01, le=100)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-100, le=100)
    frequency_penalty: float | None = Field(None, ge=-100, le=100)
    seed: int | None = Field(None, ge=-INT64_MAX - 1, le=INT64_MAX)
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_logit_bias)] = Field({})
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    bad_words: Annotated[list[str], BeforeValidator(_words)] = Field([])
    stop_token_ids: TokenIds | None = None
    min_tokens: int | None = Field(None, ge=0)
    repeat_last_n: int | None = Field(None, ge=-1, le=INT32_MAX)
    typical_p: float | None = Field(None, ge=0, le=1)
    top_n_sigma: float | None = Field(None, ge=-1, le=1000)
    xtc_probability: float | None = Field(None, ge=0, le=1)
    xtc_threshold: float | None = Field(None, ge=0, le=1)
    dynatemp_range: float | None = Field(None, ge=0, le=100)
    dynatemp_exponent: float | None = Field(None, ge=0, le=100)
    mirostat: int | None = Field(None, ge=0, le=2)
    mirostat_tau: float | None = Field(None, ge=0, le=100)
    mirostat_eta: float | None = Field(None, ge=0, le=100)
    dry_multiplier: float | None = Field(None, ge=0, le=1000)
    dry_base: Annotated[float | None, BeforeValidator(_dry_base)] = Field(None, ge=1, le=1000)
    dry_allowed_length: int | None = Field(None, ge=0, le=INT32_MAX)
    dry_penalty_last_n: int | None = Field(None, ge=-1, le=INT32_MAX)
    dry_sequence_breakers: Annotated[list[str] | None, BeforeValidator(_breakers)] = None
    min_keep: int | None = Field(None, ge=0, le=INT32_MAX)
    samplers: Annotated[
        tuple[str, ...] | None, BeforeValidator(_samplers, json_schema_input_type=list[str] | str | None)
    ] = None
    include_stop_str_in_output: bool | None = None

    def sampling_params(
        self, defaults: SamplingParams, vocab: Vocab, *, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        """Sampling parameters of the first answer; see `of_choice` for the others. `defaults` fill what the
        request omits.

        The card's penalty is meant for drawn tokens, so a greedy answer has it only on request. A seed of -1
        is no seed. Raises ApiError 400.
        """
        repetition = self.repeat_penalty if self.repetition_penalty is None else self.repetition_penalty
        fields: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": None if self.top_p is None else max(self.top_p, LEAST_TOP_P),
            "top_k": None if self.top_k is None else max(0, self.top_k),
            "min_p": self.min_p,
            "repetition_penalty": repetition,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "seed": None if self.seed == -1 else self.seed,
            "ignore_eos": self.ignore_eos,
            **{name: getattr(self, name) for name in LLAMA_CPP},
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
            **self._token_rules(vocab),
        }
        if self.dry_sequence_breakers is not None:
            fields["dry_sequence_breakers"] = tuple(self.dry_sequence_breakers)
        params = replace(defaults, **{name: value for name, value in fields.items() if value is not None})
        if params.temperature == 0 and self.presence_penalty is None:
            return replace(params, presence_penalty=0.0)
        return params

    def _token_rules(self, vocab: Vocab) -> dict[str, Any]:
        """The fields about single tokens. Raises ApiError 400 for unknown ids."""
        rules: dict[str, Any] = {}
        if self.logit_bias:
            rules["logit_bias"] = tuple(self.logit_bias.items())
            _check_ids("logit_bias", self.logit_bias, vocab)
        if self.allowed_token_ids is not None:
            rules["allowed_token_ids"] = tuple(self.allowed_token_ids)
            _check_ids("allowed_token_ids", self.allowed_token_ids, vocab)
        if self.stop_token_ids:
            rules["stop_token_ids"] = frozenset(self.stop_token_ids)
            rules["include_stop"] = bool(self.include_stop_str_in_output)
            _check_ids("stop_token_ids", self.stop_token_ids, vocab)
        if self.bad_words:
            rules["bad_words"] = tuple(word for text in self.bad_words for word in spellings(text, vocab))
        if self.min_tokens:
            rules["min_tokens"] = self.min_tokens
        return rules


def llama_settings(params: SamplingParams) -> dict[str, Any]:
    """The parameters under llama-server's names, as it reports them."""
    return {
        "seed": 0xFFFFFFFF if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "ignore_eos": params.ignore_eos,
        **{name: getattr(params, name) for name in (*LLAMA_CPP, "dry_sequence_breakers")},
        "repeat_last_n": -1 if params.repeat_last_n is None else params.repeat_last_n,
    }


def of_choice(params: SamplingParams, choice: int) -> SamplingParams:
    """The parameters of answer number `choice`: its seed is shifted, so that the n answers to one prompt
    differ."""
    return params if params.seed is None or not choice else replace(params, seed=params.seed + choice)


def spellings(text: str, vocab: Vocab) -> list[tuple[int, ...]]:
    """A word's token sequences: of the word as it is and, as in vLLM, of the word without leading spaces, and
    after one space if that changes only the first token."""
    as_it_is = tuple(vocab.tokenize(text, special=True))
    bare = tuple(vocab.tokenize(text.lstrip(), special=True))
    spaced = tuple(vocab.tokenize(" " + text.lstrip(), special=True)) if bare else ()
    found = [as_it_is]
    if bare and bare != as_it_is:
        found.append(bare)
    if spaced and spaced not in found and len(spaced) == len(bare) and spaced[0] != bare[0]:
        found.append(spaced)
    return found


def _check_ids(field: str, ids: Iterable[int], vocab: Vocab) -> None:
    wrong = next((token for token in ids if not 0 <= token < vocab.n_real), None)
    if wrong is not None:
        raise bad_request(field, f"{wrong} is not a token's id; they run from 0 to {vocab.n_real - 1}")
