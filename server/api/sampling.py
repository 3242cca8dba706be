"""Request fields -> SamplingParams; the GGUF's metadata decides what a request leaves out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from server.engine import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from server.api.protocol import GenerationRequest


def sampling_defaults(metadata: Mapping[str, str], *, greedy: bool) -> SamplingParams:
    """The model's own values: `general.sampling.*`, llama.cpp's LLM_KV_GENERAL_SAMPLING_*.

    `greedy` makes the temperature 0 whatever the file says. Raises ValueError for a value out of range.
    """

    def number(key: str, neutral: float) -> float:
        return float(metadata.get(f"general.sampling.{key}", neutral))

    try:
        return SamplingParams(
            temperature=0.0 if greedy else number("temp", 0.0),
            top_p=number("top_p", 1.0),
            top_k=max(0, int(number("top_k", 0))),
            min_p=number("min_p", 0.0),
            repetition_penalty=number("penalty_repeat", 1.0),
        )
    except (ValueError, OverflowError) as error:
        raise ValueError(f"the GGUF's general.sampling.* cannot be used: {error}") from error


def sampling_params(request: GenerationRequest, defaults: SamplingParams, *, choice: int) -> SamplingParams:
    """How to sample the answer number `choice` of a request.

    The seed is moved on by `choice`, so that the n answers to one prompt differ; -1 counts as none.
    """
    seed = None if request.seed in (None, -1) else request.seed
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
        "seed": None if seed is None else seed + choice,
        "ignore_eos": request.ignore_eos,
        "logprobs": request.answer_logprobs,
        "prompt_logprobs": request.scored_prompt,
    }
    return replace(defaults, **{name: value for name, value in fields.items() if value is not None})
