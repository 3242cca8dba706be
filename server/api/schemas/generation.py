"""The fields that every endpoint which generates shares."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from server.api.schemas.unsupported import NEUTRAL, refuse_unsupported

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


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
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = NEUTRAL

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
        if isinstance(body, dict):
            refuse_unsupported(body, cls.unsupported)
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
