"""What clients may send: one model a kind of request, and the fields that are refused."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from server.api.errors import bad_request

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
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
"""Known fields that this server does not act on and that would change the answer: refused, never ignored.
Field -> the values that ask for nothing special, besides null."""


# --- every endpoint that generates -------------------------------------------------------------------------


def _stop_list(value: Any) -> list[str]:
    """`stop` as a list; by hand, since a union type complains once for each of its branches."""
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if not all(stops):
        raise ValueError("a stop string cannot be empty")
    return stops


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class GenerationRequest(BaseModel):
    """How to generate. Unknown fields are ignored, null counts as absent, and types are not coerced."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = UNSUPPORTED

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=INT32_MAX)
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, gt=0, le=100)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float | None = Field(None, ge=-100, le=100)
    frequency_penalty: float | None = Field(None, ge=-100, le=100)
    seed: int | None = Field(None, ge=-1, le=INT64_MAX)
    stop: Annotated[list[str], BeforeValidator(_stop_list)] = []
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    n: int | None = Field(None, ge=1, le=128)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        """Raises ApiError 400 naming the first field that asks for something this server cannot do."""
        refuse(body, cls.unsupported)
        return body

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate for a choice; None is all that the context holds."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def whole(self) -> bool:
        """Whether nothing can be done with a part of the answer: not send it, nor end it early."""
        return not self.stream and not self.stop

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def refuse(body: Any, unsupported: dict[str, tuple[Any, ...]]) -> None:
    """Raises ApiError 400 naming the first of the `unsupported` fields that asks for something."""
    for field, value in body.items() if isinstance(body, dict) else ():
        if field in unsupported and value is not None and not _in(value, unsupported[field]):
            raise bad_request(
                f"{field}: not supported by this server; leave it out", field, "unsupported_parameter"
            )


def _in(value: Any, allowed: tuple[Any, ...]) -> bool:
    # 0 == False in Python, but "logprobs": 0 asks for the chosen token's
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed)


# --- /v1/completions, and /invocations with a `prompt` -----------------------------------------------------

PromptInput = str | list[int]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


def _prompt_list(value: Any) -> list[PromptInput]:
    """The four forms of `prompt` as one: a list of texts or of token ids."""
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(prompts, list) or not all(isinstance(item, str) or _is_ids(item) for item in prompts):
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")
    if not prompts or not all(prompts):
        raise ValueError("must not be empty")
    return prompts


class CompletionRequest(GenerationRequest):
    """Text in, text out: no template, no thinking."""

    prompt: Annotated[list[PromptInput], BeforeValidator(_prompt_list)]
    echo: bool | None = None


# --- /v1/chat/completions, and /invocations with `messages` ------------------------------------------------

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _template_kwargs(value: Any) -> Any:
    if isinstance(value, dict) and not isinstance(value.get("enable_thinking"), bool | None):
        raise ValueError("enable_thinking must be true or false")
    return value


def _thinking(value: Any) -> bool | None:
    """A flag, or the object that some clients send in its place: {"type": "enabled" | "disabled"}."""
    if isinstance(value, dict) and value.get("type") in ("enabled", "disabled"):
        return bool(value["type"] == "enabled")
    if not isinstance(value, bool | None):
        raise ValueError('must be true, false, or {"type": "enabled"} or {"type": "disabled"}')
    return value


def _tool_choice(value: Any) -> Any:
    if value not in (None, "none", "auto"):
        raise ValueError('must be "none" or "auto"; a call cannot be forced on this server')
    return value


class ChatRequest(GenerationRequest):
    """A conversation. The insides of messages and tools are checked where they are rendered."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        name: values
        for name, values in {**UNSUPPORTED, "echo": (False,)}.items()
        if name not in ("add_generation_prompt", "continue_final_message")
    }

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[Literal["none", "auto"] | None, BeforeValidator(_tool_choice)] = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, BeforeValidator(_template_kwargs)] = None
    thinking: Annotated[bool | None, BeforeValidator(_thinking)] = None
    reasoning_effort: ReasoningEffort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _one_way_to_go_on(self) -> ChatRequest:
        """Raises ApiError 400 as vLLM does."""
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message: add_generation_prompt must be false, or left out, beside it"
            raise bad_request(message, "continue_final_message", "invalid_value")
        return self

    @property
    def continues(self) -> bool:
        """Whether the reply goes on from the last message: asked for, or an assistant's text stands there."""
        if self.continue_final_message is not None or self.add_generation_prompt is not None:
            return bool(self.continue_final_message)
        last = self.messages[-1] if self.messages else {}
        return last.get("role") == "assistant" and not last.get("tool_calls")

    def thinks(self, default: bool) -> bool:
        """Whether thinking is asked for; where the spellings disagree, the most specific one decides."""
        enabled = (self.chat_template_kwargs or {}).get("enable_thinking")
        if enabled is None:
            enabled = self.thinking
        if enabled is None and self.reasoning_effort is not None:
            enabled = self.reasoning_effort != "none"
        return default if enabled is None else bool(enabled)

    @property
    def whole(self) -> bool:
        """As everywhere, but a single tool call ends an answer that may have only one."""
        return super().whole and self.parallel_tool_calls is not False

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools the model is told of."""
        return None if self.tool_choice == "none" else self.tools or None


# --- /tokenize and /detokenize, as llama-server has them ---------------------------------------------------


class TokenizeRequest(BaseModel):
    """Text to ids. `add_special` puts the beginning-of-sequence token first, where the model has one."""

    model_config = ConfigDict(strict=True)

    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(BaseModel):
    """Ids to text."""

    model_config = ConfigDict(strict=True)

    tokens: list[int]
