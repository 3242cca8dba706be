"""Request fields -> SamplingParams; the model's own values decide what a request leaves out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from qwen_serve.server.api.errors import bad_request
from qwen_serve.server.engine import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from qwen_serve.server.api.protocol import GenerationRequest
    from qwen_serve.server.engine import Vocab

Mode = Literal["text", "instruct", "thinking"]
"""A text that is continued, and a chat whose reply begins with the answer, or with reasoning."""

Source = Literal["file", "card", "card-coding"]
"""Where the values are from that requests leave out."""

THINKING = SamplingParams(temperature=1.0, top_p=0.95, top_k=20, presence_penalty=1.5)
THINKING_CODING = SamplingParams(temperature=0.6, top_p=0.95, top_k=20)
INSTRUCT = SamplingParams(temperature=0.7, top_p=0.8, top_k=20, presence_penalty=1.5)
"""The model card of Qwen3.5 (4B and others), "Best Practices": thinking in general and for precise coding
tasks, and its instruct mode for general tasks."""


@dataclass(frozen=True)
class SamplingDefaults:
    """What requests leave out, by mode."""

    text: SamplingParams
    instruct: SamplingParams
    thinking: SamplingParams

    def of(self, mode: Mode) -> SamplingParams:
        """Those of a mode."""
        found: SamplingParams = getattr(self, mode)
        return found


def sampling_defaults(
    metadata: Mapping[str, str], *, greedy: bool, source: Source = "file"
) -> SamplingDefaults:
    """The model's own values: those of its file or, for chats, of its card; with `greedy`, temperature 0.

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

    try:
        return SamplingParams(
            temperature=number("temp", 0.0),
            top_p=number("top_p", 1.0),
            top_k=max(0, int(number("top_k", 0))),
            min_p=number("min_p", 0.0),
            repetition_penalty=number("penalty_repeat", 1.0),
        )
    except (ValueError, OverflowError) as error:
        raise ValueError(f"the GGUF's general.sampling.* cannot be used: {error}") from error


def sampling_params(
    request: GenerationRequest, defaults: SamplingDefaults, vocab: Vocab, *, mode: Mode
) -> SamplingParams:
    """How to sample the first answer to a request; see `of_choice` for the others.

    A greedy answer has the penalty of the card, which is there to vary what is drawn, only if it is asked
    for. A seed of -1 counts as none. Raises ApiError 400.
    """
    fields: dict[str, Any] = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": None if request.top_k is None else max(0, request.top_k),
        "min_p": request.min_p,
        "repetition_penalty": request.repeat_penalty
        if request.repetition_penalty is None
        else request.repetition_penalty,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "seed": None if request.seed == -1 else request.seed,
        "ignore_eos": request.ignore_eos,
        "logprobs": request.answer_logprobs,
        "prompt_logprobs": request.scored_prompt,
        **token_rules(request, vocab),
    }
    params = replace(
        defaults.of(mode), **{name: value for name, value in fields.items() if value is not None}
    )
    if params.temperature == 0 and request.presence_penalty is None:
        return replace(params, presence_penalty=0.0)
    return params


def of_choice(params: SamplingParams, choice: int) -> SamplingParams:
    """For the answer number `choice`: its seed is moved on, so that the n answers to one prompt differ."""
    return params if params.seed is None or not choice else replace(params, seed=params.seed + choice)


def token_rules(request: GenerationRequest, vocab: Vocab) -> dict[str, Any]:
    """The fields that are about single tokens. Raises ApiError 400 for ids that there are not."""
    rules: dict[str, Any] = {}
    if request.logit_bias:
        rules["logit_bias"] = tuple(request.logit_bias.items())
        _check_ids("logit_bias", request.logit_bias, vocab)
    if request.allowed_token_ids is not None:
        rules["allowed_token_ids"] = tuple(request.allowed_token_ids)
        _check_ids("allowed_token_ids", request.allowed_token_ids, vocab)
    if request.stop_token_ids:
        rules["stop_token_ids"] = frozenset(request.stop_token_ids)
        rules["include_stop"] = bool(request.include_stop_str_in_output)
        _check_ids("stop_token_ids", request.stop_token_ids, vocab)
    if request.bad_words:
        rules["bad_words"] = tuple(word for text in request.bad_words for word in spellings(text, vocab))
    if request.min_tokens:
        rules["min_tokens"] = request.min_tokens
    return rules


def spellings(text: str, vocab: Vocab) -> list[tuple[int, ...]]:
    """A word in tokens, as it is and, as in vLLM, without spaces before it and behind one, where that only
    makes its first token another."""
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
        raise bad_request(
            f"{field}: {wrong} is not a token's id; they run from 0 to {vocab.n_real - 1}",
            field,
            "invalid_value",
        )
