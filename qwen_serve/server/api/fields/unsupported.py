"""Known fields that this server does not support. It refuses them and never ignores them."""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from qwen_serve.server.api.errors import refused

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "suffix": ("",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "extra_body": ({},),  # the openai package's, which sends the fields in it beside the others
    # llama-server
    "post_sampling_probs": (False,),
    "n_indent": (0,),
    "n_cmpl": (1,),
    "adaptive_target": (-1,),
    "t_max_predict_ms": (0, -1),
    "return_tokens": (False,),
    "response_fields": ([],),
    "parse_tool_calls": (True,),
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
    "reasoning_control": (False,),
    # vLLM
    "prompt_embeds": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "chat_template": (),
    "documents": ([],),
    "truncation_side": ("left",),
    "logprob_token_ids": (),
    "return_token_ids": (False,),
    "return_prompt_text": (False,),
    "watermarking": (False,),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "vllm_xargs": ({},),
    "repetition_detection": (),
    "stream_interval": (1,),
    "routed_experts_prompt_start": (0,),
    # SGLang; image_data of llama-server's former API, too
    "image_data": ([],),
    "video_data": ([],),
    "audio_data": ([],),
    "stop_regex": ([], ""),
    "no_stop_trim": (False,),
    "min_new_tokens": (0,),
    "stream_reasoning": (True,),
    "custom_logit_processor": (),
    "custom_params": (),
    "lora_path": (),
    "extra_key": (),
    "return_hidden_states": (False,),
    "return_prompt_token_ids": (False,),
    "return_meta_info": (False,),
    "return_cached_tokens_details": (False,),
    "return_routed_experts": (False,),
    "input_ids": (),
    "session_params": ({},),
}
"""Fields that would change the answer -> their values without effect, besides null."""

ELSEWHERE = {
    **dict.fromkeys(("input", "prompt", "system", "instructions"), "messages"),
    "max_output_tokens": "max_completion_tokens",
    "stop_sequences": "stop",
    **dict.fromkeys(("text", "format", "output_format", "output_config"), "response_format"),
    "think": "enable_thinking",
    "options": "fields of their own",
}
"""Fields of this server's other formats -> what a chat has for them."""


class Refusing(BaseModel):
    """A body whose known fields have an effect or are refused; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Field -> its values without effect, besides null."""
    instead: ClassVar[dict[str, str]] = {}
    """Field -> the alternative here, if there is one."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        """Raises ApiError 400 naming the first field that asks for something this server cannot do."""
        for field, value in body.items() if isinstance(body, dict) else ():
            if field in cls.unsupported and value is not None and not _in(value, cls.unsupported[field]):
                what = "not supported by this server; leave it out"
                if field == "extra_body":
                    what = "send the fields in it beside the others, as the openai package does"
                if field in cls.instead:
                    what = f"this endpoint has {cls.instead[field]} for it"
                raise refused(field, what)
        return body


def _in(value: Any, allowed: tuple[Any, ...]) -> bool:
    # 0 == False in Python, but "logprobs": 0 asks for the chosen token's
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed)
