"""Fields of every generating request; each format adds its own."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from qwen_serve.server.api.errors import bad_request, refused
from qwen_serve.server.api.fields.lora import LoraChoice
from qwen_serve.server.api.fields.sampling import Mode, SamplingFields
from qwen_serve.server.api.fields.structured import StructuredFields
from qwen_serve.server.api.fields.unsupported import UNSUPPORTED, Refusing
from qwen_serve.server.chat.formats import AnswerFormat
from qwen_serve.server.chat.tool_formats import ToolFormat
from qwen_serve.server.engine import MAX_LOGPROBS

MAX_STOPS = 64
MAX_STOP_CHARACTERS = 4096
"""Most characters of all stop strings. Matching needs about 350 bytes a character as long as the answer
runs."""

LONGEST_NAME = 256
"""Most characters of a model's name, which every event of a stream repeats."""


def _stop_list(value: Any) -> list[str]:
    """`stop` as a list. It is not a union type, because that reports one error for each of its branches."""
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


def _limit(value: Any) -> Any:
    if value == 0:
        raise ValueError("must be at least 1, or -1 for no limit")
    return value


TokenLimit = Annotated[int, Field(ge=-1), BeforeValidator(_limit)]
"""Most tokens of an answer; -1: no limit."""

StopInput = (
    Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
    | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS)]
)


class StreamOptions(BaseModel):
    """OpenAI's and vLLM's `stream_options`."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's: with `include_usage`, the tokens so far in every chunk."""


class GenerationRequest(SamplingFields, StructuredFields, Refusing):
    """How to generate. Unknown fields are ignored, null counts as absent, and types are not coerced."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = UNSUPPORTED

    model: str | None = Field(None, max_length=LONGEST_NAME)
    request_id: str | None = Field(None, min_length=1, max_length=LONGEST_NAME)
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    stop: Annotated[list[str], BeforeValidator(_stop_list, json_schema_input_type=StopInput | None)] = Field(
        []
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=128)
    best_of: int | None = None
    n_predict: int | None = Field(None, ge=-1)
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    # log-probabilities, in addition to the `logprobs` of each endpoint
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    n_probs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_tokens_as_token_ids: bool | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    cache_prompt: bool | None = None
    cache_report: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    lora: list[LoraChoice] | None = Field(None, max_length=256)

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            raise bad_request("prompt_logprobs", "not in a stream; leave stream out")
        return self

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """Raises ApiError 400 for fields that contradict each other."""
        if self.best_of not in (None, self.choices):
            raise refused("best_of", f"must be n, which is {self.choices}: all answers are returned")
        if self.truncate_prompt_tokens == 0:
            raise bad_request("truncate_prompt_tokens", "must be at least 1, or -1 for what fits")
        limit = self.token_limit
        if limit is not None and (self.min_tokens or 0) > limit:
            raise bad_request("min_tokens", f"must be at most max_tokens, which is {limit}")
        return self

    def mode(self, *, thinking: bool, can_think: bool) -> Mode:
        """The mode of the answer; `thinking` is the server's default."""
        return "text"

    @property
    def answer_logprobs(self) -> int | None:
        """Alternatives with log-probabilities for each token of the answer; None if the request wants no
        log-probabilities."""
        return self.n_probs or None

    @property
    def scored_prompt(self) -> int | None:
        """The same for the tokens of the prompt."""
        return self.prompt_logprobs

    @property
    def by_n_probs(self) -> bool:
        """Whether log-probabilities are requested by llama-server's `n_probs`."""
        return bool(self.n_probs)

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate for a choice; None: as many as fit into the context."""
        given = (self.max_completion_tokens, self.max_tokens, self.n_predict)
        limit = next((one for one in given if one is not None), None)
        return None if limit == -1 else limit

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def reports_progress(self) -> bool:
        """Whether a stream reports how much of the prompt has been read."""
        return bool(self.return_progress)

    @property
    def whole(self) -> bool:
        """Whether the answer is useful only as a whole: it is not streamed and cannot end early."""
        return not self.stream and not self.stop

    def wanted_format(self, special: Sequence[str]) -> AnswerFormat | ToolFormat | None:
        """The required format of the answer; `special` are the vocabulary's added tokens as text. Raises
        PromptError and ApiError 400."""
        return self._with_an_end(self.answer_format(special))

    def _with_an_end(self, wanted: AnswerFormat | ToolFormat | None) -> AnswerFormat | ToolFormat | None:
        if wanted is not None and self.ignore_eos:
            raise bad_request("ignore_eos", f"contradicts {wanted.param}: what is complete must end")
        return wanted

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk carries usage."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)
