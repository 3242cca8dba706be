"""/v1/completions, and /invocations with a `prompt`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from server.api.schemas.generation import GenerationRequest

Prompt = str | list[int]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


def _prompt_list(value: Any) -> list[Prompt]:
    """The four forms of `prompt` as one: a list of texts or of token ids."""
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(prompts, list) or not all(isinstance(item, str) or _is_ids(item) for item in prompts):
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")
    if not prompts or not all(prompts):
        raise ValueError("must not be empty")
    return prompts


class CompletionRequest(GenerationRequest):
    """Text in, text out: no template, no thinking."""

    prompt: Annotated[list[Prompt], BeforeValidator(_prompt_list)]
    echo: bool | None = None
