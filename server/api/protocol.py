"""What clients may send: one model a kind of request, and the fields that are refused."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from qwen_serve.server.api.errors import bad_request
from qwen_serve.server.api.structured import StructuredFields, calls_format, check_tool_choice
from qwen_serve.server.api.thinking import BUDGETS, ThinkingFields
from qwen_serve.server.engine import MAX_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qwen_serve.server.api.sampling import Mode
    from qwen_serve.server.chat.formats import AnswerFormat, ToolFormat

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

MAX_STOPS = 64
MAX_STOP_CHARACTERS = 4096
"""What follows the text for stop strings takes some 350 bytes a character, as long as the answer takes."""

MAX_PROMPTS = 2048
MAX_MESSAGES = 16_384
MAX_TOOLS = 1024

MAX_TOKEN_RULES = 16_384
"""Tokens that a field names. Every answer goes through them as it begins, in some milliseconds."""

MAX_WORDS = 1024
MAX_WORD_CHARACTERS = 16_384
"""Of `bad_words`, which are made tokens of while everybody waits: up to 10 ms."""

LONGEST_NAME = 256
"""Of a model, which every event of a stream repeats."""

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    # llama-server
    "post_sampling_probs": (False,),
    "mirostat": (0,),
    "typical_p": (1,),
    "top_n_sigma": (-1,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "samplers": (),
    "n_keep": (0,),
    "n_indent": (0,),
    "n_cmpl": (1,),
    "min_keep": (0, 1),
    "adaptive_target": (-1,),
    "t_max_predict_ms": (0, -1),
    "return_tokens": (False,),
    "return_progress": (False,),
    "response_fields": ([],),
    "lora": ([],),
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
    "priority": (0,),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "vllm_xargs": ({},),
    "repetition_detection": (),
    "stream_interval": (1,),
    "routed_experts_prompt_start": (0,),
    # SGLang
    "stop_regex": ([], ""),
    "no_stop_trim": (False,),
    "min_new_tokens": (0,),
    "stream_reasoning": (True,),
    "custom_logit_processor": (),
    "custom_params": (),
    "lora_path": (),
    "return_hidden_states": (False,),
    "return_prompt_token_ids": (False,),
    "return_meta_info": (False,),
    "return_cached_tokens_details": (False,),
    "return_routed_experts": (False,),
    "input_ids": (),
    "session_params": ({},),
}
"""Known fields that this server does not act on and that would change the answer: refused, never ignored.
Field -> the values that ask for nothing special, besides null."""


class Refusing(BaseModel):
    """A body whose fields are acted on or refused; those that nobody knows are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Field -> the values that ask for nothing special, besides null."""
    instead: ClassVar[dict[str, str]] = {}
    """Some of these -> what says the same here."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        """Raises ApiError 400 naming the first field that asks for something this server cannot do."""
        for field, value in body.items() if isinstance(body, dict) else ():
            if field in cls.unsupported and value is not None and not _in(value, cls.unsupported[field]):
                what = "not supported by this server; leave it out"
                if field in cls.instead:
                    what = f"this endpoint has {cls.instead[field]} for it"
                raise bad_request(f"{field}: {what}", field, "unsupported_parameter")
        return body


def _in(value: Any, allowed: tuple[Any, ...]) -> bool:
    # 0 == False in Python, but "logprobs": 0 asks for the chosen token's
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed)


# --- every endpoint that generates -------------------------------------------------------------------------


def _stop_list(value: Any) -> list[str]:
    """`stop` as a list; by hand, since a union type complains once for each of its branches."""
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if not all(stops):
        raise ValueError("a stop string cannot be empty")
    if len(stops) > MAX_STOPS or sum(map(len, stops)) > MAX_STOP_CHARACTERS:
        raise ValueError(
            f"must be at most {MAX_STOPS} strings of {MAX_STOP_CHARACTERS:,} characters together"
        )
    return stops


StopInput = (
    Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
    | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS)]
)


def _logit_bias(value: Any) -> dict[int, float]:
    """OpenAI's object by token id, or llama-server's list of pairs, in which false bans a token."""
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


TokenIds = Annotated[list[int], Field(fail_fast=True, max_length=MAX_TOKEN_RULES)]


class StreamOptions(BaseModel):
    """OpenAI's, and vLLM's."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's: with `include_usage`, the tokens so far in every chunk."""


class GenerationRequest(StructuredFields, Refusing):
    """How to generate. Unknown fields are ignored, null counts as absent, and types are not coerced."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = UNSUPPORTED

    model: str | None = Field(None, max_length=LONGEST_NAME)
    request_id: str | None = Field(None, min_length=1, max_length=LONGEST_NAME)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=INT32_MAX)
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, ge=0.01, le=100)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-100, le=100)
    frequency_penalty: float | None = Field(None, ge=-100, le=100)
    seed: int | None = Field(None, ge=-INT64_MAX - 1, le=INT64_MAX)
    stop: Annotated[list[str], BeforeValidator(_stop_list, json_schema_input_type=StopInput | None)] = Field(
        []
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    n: int | None = Field(None, ge=1, le=128)
    best_of: int | None = None
    n_predict: int | None = Field(None, ge=-1)
    # single tokens
    logit_bias: Annotated[dict[int, float], BeforeValidator(_logit_bias)] = Field({})
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    bad_words: Annotated[list[str], BeforeValidator(_words)] = Field([])
    stop_token_ids: TokenIds | None = None
    min_tokens: int | None = Field(None, ge=0)
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    repeat_last_n: int | None = Field(None, ge=-1)
    # log-probabilities, beside the `logprobs` of each endpoint
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    n_probs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_tokens_as_token_ids: bool | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    cache_prompt: bool | None = None
    cache_report: bool | None = None
    timings_per_token: bool | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            raise bad_request("prompt_logprobs: not in a stream; leave stream out", "prompt_logprobs")
        return self

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """Raises ApiError 400 for fields that contradict each other."""
        if self.best_of not in (None, self.choices):
            message = f"best_of: must be n, which is {self.choices}: all answers are returned"
            raise bad_request(message, "best_of", "unsupported_parameter")
        if self.truncate_prompt_tokens == 0:
            message = "truncate_prompt_tokens: must be at least 1, or -1 for what fits"
            raise bad_request(message, "truncate_prompt_tokens", "invalid_value")
        limit = self.token_limit
        if limit is not None and (self.min_tokens or 0) > limit:
            message = f"min_tokens: must be at most max_tokens, which is {limit}"
            raise bad_request(message, "min_tokens", "invalid_value")
        factors = self.repeat_penalty, self.repetition_penalty
        amounts = self.presence_penalty, self.frequency_penalty
        penalised = any(factor not in (None, 1) for factor in factors) or any(amounts)
        if penalised and self.repeat_last_n not in (None, -1):
            message = "repeat_last_n: must be -1 beside a penalty, all of which look back on the whole text"
            raise bad_request(message, "repeat_last_n", "unsupported_parameter")
        return self

    def mode(self, *, thinking: bool, can_think: bool) -> Mode:
        """What is answered; `thinking` is what the server does where a request does not say."""
        return "text"

    @property
    def answer_logprobs(self) -> int | None:
        """How many alternatives to each token of the answer are told with their log-probabilities; None if
        not even those of the token are."""
        return self.n_probs or None

    @property
    def scored_prompt(self) -> int | None:
        """The same for the tokens of the prompt."""
        return self.prompt_logprobs

    @property
    def by_n_probs(self) -> bool:
        """Whether they were asked for in llama-server's way."""
        return bool(self.n_probs)

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate for a choice; None is all that the context holds."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        if self.max_tokens is not None:
            return self.max_tokens
        return None if self.n_predict == -1 else self.n_predict

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def whole(self) -> bool:
        """Whether nothing can be done with a part of the answer: not send it, nor end it early."""
        return not self.stream and not self.stop

    def wanted_format(self, special: Sequence[str]) -> AnswerFormat | ToolFormat | None:
        """What the answer must look like; `special` are the vocabulary's added tokens, by their texts. Raises
        PromptError and ApiError 400."""
        return self._with_an_end(self.answer_format(special))

    def _with_an_end(self, wanted: AnswerFormat | ToolFormat | None) -> AnswerFormat | ToolFormat | None:
        if wanted is not None and self.ignore_eos:
            message = f"ignore_eos and {wanted.param} contradict each other: what is complete must end"
            raise bad_request(message, "ignore_eos", "invalid_value")
        return wanted

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk has it."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


# --- /v1/completions, and /invocations with a `prompt` -----------------------------------------------------

PromptInput = str | list[int]


NonEmptyIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
NonEmptyText = Annotated[str, Field(min_length=1)]
AnyPrompt = (
    NonEmptyText
    | NonEmptyIds
    | Annotated[list[NonEmptyText | NonEmptyIds], Field(min_length=1, max_length=MAX_PROMPTS)]
)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


def _prompt_list(value: Any) -> list[PromptInput]:
    """The four forms of `prompt` as one: a list of texts or of token ids."""
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(prompts, list) or not all(isinstance(item, str) or _is_ids(item) for item in prompts):
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")
    if not prompts or not all(prompts):
        raise ValueError("must not be empty")
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS:,} prompts can be sent at once")
    return prompts


class CompletionRequest(GenerationRequest):
    """Text in, text out: no template, no thinking."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **UNSUPPORTED,
        "top_logprobs": (0,),
        "enable_thinking": (False,),
        "thinking": (False, {"type": "disabled"}),
        "reasoning": ({"effort": "none"},),
        "reasoning_effort": ("none",),
        **dict.fromkeys(BUDGETS, (-1, 0)),
        "reasoning_budget_message": ("",),
        "thinking_repetition_penalty": (1,),
    }

    prompt: Annotated[list[PromptInput], BeforeValidator(_prompt_list, json_schema_input_type=AnyPrompt)]
    max_tokens: int | None = Field(None, ge=0)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _nothing_only_with_echo(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise bad_request("max_tokens: must be at least 1, or 0 with echo", "max_tokens", "invalid_value")
        return self

    @property
    def answer_logprobs(self) -> int | None:
        return super().answer_logprobs if self.logprobs is None else self.logprobs

    @property
    def by_n_probs(self) -> bool:
        return super().by_n_probs and self.logprobs is None

    @property
    def scored_prompt(self) -> int | None:
        echoed = self.logprobs if self.echo else None
        wanted = [number for number in (self.prompt_logprobs, echoed) if number is not None]
        return max(wanted, default=None)


# --- /v1/chat/completions, and /invocations with `messages` ------------------------------------------------


def described_as(kind: Any) -> BeforeValidator:
    """For a field that is checked later: what its insides must be, for the description."""
    return BeforeValidator(lambda value: value, json_schema_input_type=kind)


class MessageInput(BaseModel):
    """One turn; more fields as the chat template reads them."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None


class TextPart(BaseModel):
    """A piece of a message's text."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class FunctionInput(BaseModel):
    """What can be called."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolInput(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: FunctionInput


class ChatRequest(ThinkingFields, GenerationRequest):
    """A conversation. The insides of messages and tools are checked where they are rendered."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        name: values
        for name, values in {**UNSUPPORTED, "echo": (False,)}.items()
        if name not in ("add_generation_prompt", "continue_final_message")
    }

    messages: Annotated[
        list[dict[str, Any]], described_as(Annotated[list[MessageInput], Field(min_length=1)])
    ] = Field(fail_fast=True, max_length=MAX_MESSAGES)
    tools: Annotated[list[dict[str, Any]] | None, described_as(list[ToolInput] | None)] = Field(
        None, fail_fast=True, max_length=MAX_TOOLS
    )
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        BeforeValidator(check_tool_choice, json_schema_input_type=str | dict[str, Any] | None),
    ] = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    reasoning_format: Literal["auto", "deepseek", "none"] | None = None

    def inlines_reasoning(self, default: bool) -> bool:
        """Whether the think block stays in the content; `default` is what the server does."""
        if self.include_reasoning is False:
            return False
        asked = self.reasoning_format == "none" or self.separate_reasoning is False
        return asked or (default and self.reasoning_format != "deepseek" and not self.separate_reasoning)

    @model_validator(mode="after")
    def _one_way_to_go_on(self) -> Self:
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

    @model_validator(mode="after")
    def _top_only_with_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs: needs logprobs to be true", "top_logprobs", "invalid_value")
        return self

    @property
    def answer_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else super().answer_logprobs

    @property
    def by_n_probs(self) -> bool:
        return super().by_n_probs and not self.logprobs

    def mode(self, *, thinking: bool, can_think: bool) -> Mode:
        return "thinking" if can_think and self.thinks(thinking) else "instruct"

    @property
    def whole(self) -> bool:
        """As everywhere, but a single tool call ends an answer that may have only one."""
        return super().whole and self.parallel_tool_calls is not False

    def wanted_format(self, special: Sequence[str]) -> AnswerFormat | ToolFormat | None:
        """What the answer, or its calls, must look like. Raises PromptError and ApiError 400."""
        answer = self.answer_format(special)
        parallel = self.parallel_tool_calls is not False
        tools = self.offered_tools
        calls = calls_format(self.tool_choice, tools, parallel=parallel, beside=answer)
        if (wanted := calls or answer) is not None and self.continues:
            message = f"{wanted.param} and a message that the reply continues contradict each other"
            raise bad_request(message, wanted.param, "invalid_value")
        return self._with_an_end(wanted)

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools the model is told of."""
        return None if self.tool_choice == "none" else self.tools or None


# --- /tokenize and /detokenize -----------------------------------------------------------------------------


class TokenizeRequest(BaseModel):
    """Text to ids, as llama-server has it. `add_special` puts the beginning-of-sequence token first, where
    the model has one."""

    model_config = ConfigDict(strict=True)

    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class TokenizePromptRequest(BaseModel):
    """A text to ids, as vLLM has it."""

    model_config = ConfigDict(strict=True, protected_namespaces=())

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatRequest):
    """A conversation to the ids of the prompt that it would be answered with, as vLLM has it."""

    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """Ids to text."""

    model_config = ConfigDict(strict=True)

    tokens: list[int] = Field(fail_fast=True)
