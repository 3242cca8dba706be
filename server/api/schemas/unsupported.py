"""Known fields that this server does not act on and that would change the answer: refused, never ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from server.api.errors import bad_request

if TYPE_CHECKING:
    from collections.abc import Mapping

NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "best_of": (1,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    # llama-server
    "grammar": ("",),
    "json_schema": ({},),
    "n_probs": (0,),
    "mirostat": (0,),
    "typical_p": (1,),
    "top_n_sigma": (-1,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "samplers": (),
    "n_keep": (0,),
    # vLLM
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "chat_template": (),
    "documents": ([],),
}
"""Field -> the values that ask for nothing special, besides null."""


def refuse_unsupported(body: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises ApiError 400 naming the first field that asks for something this server cannot do."""
    for field, value in body.items():
        if field in neutral and value is not None and not _in(value, neutral[field]):
            raise bad_request(
                f"{field}: not supported by this server; leave it out", field, "unsupported_parameter"
            )


def _in(value: Any, allowed: tuple[Any, ...]) -> bool:
    # 0 == False in Python, but "logprobs": 0 asks for the chosen token's
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed)
