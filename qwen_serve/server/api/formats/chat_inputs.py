"""The objects of a chat request, as OpenAPI describes them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from qwen_serve.server.chat.pictures import MOST_BOUND


class MessageInput(BaseModel):
    """One turn, with any further fields that the chat template reads."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | ImagePart] | None = None


class TextPart(BaseModel):
    """A piece of a message's text."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class ImageUrl(BaseModel):
    """A picture's file, as a data URL in base64."""

    url: str
    detail: Literal["auto", "high", "low"] | None = None


class ImagePart(BaseModel):
    """A picture, where the server has a vision tower (`--mmproj`)."""

    type: Literal["image_url"]
    image_url: str | ImageUrl
    min_pixels: int | None = Field(None, ge=1, le=MOST_BOUND)
    max_pixels: int | None = Field(None, ge=1, le=MOST_BOUND)


class ProcessorKwargs(BaseModel):
    """Lower and upper bounds for the size of every picture: vLLM's field, for Qwen's processors."""

    model_config = ConfigDict(strict=True, extra="forbid")

    min_pixels: int | None = Field(None, ge=1, le=MOST_BOUND)
    max_pixels: int | None = Field(None, ge=1, le=MOST_BOUND)


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
