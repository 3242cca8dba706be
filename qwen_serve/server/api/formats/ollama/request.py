"""Ollama's requests, and their translation to chat requests and completions."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import Field, ValidationError

from qwen_serve.server.api.errors import bad_request, from_validation, refused
from qwen_serve.server.api.fields.generation import LONGEST_NAME
from qwen_serve.server.api.fields.unsupported import Refusing
from qwen_serve.server.api.formats.chat import MAX_MESSAGES, MAX_TOOLS, ChatRequest
from qwen_serve.server.api.formats.completions import CompletionRequest
from qwen_serve.server.api.formats.translation import FOREIGN, to_chat
from qwen_serve.server.chat.errors import list_in, object_in, text_in
from qwen_serve.server.chat.pictures import GivenPicture
from qwen_serve.server.engine import MAX_LOGPROBS

OPTIONS = {
    "num_predict": "max_tokens",
    **{
        name: name
        for name in (
            *("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop", "repeat_last_n"),
            *("repeat_penalty", "presence_penalty", "frequency_penalty"),
            *("mirostat", "mirostat_tau", "mirostat_eta"),
        )
    },
}
"""Ollama's option -> field of this server. Other options are ignored, as Ollama does: most are about loading
the model, which the server's settings decide."""

NAMES = {
    **{ours: f"options.{theirs}" for theirs, ours in OPTIONS.items()},
    "response_format": "format",
    "response_format.schema": "format",
    "response_format.json_schema.schema": "format",
    "reasoning_effort": "think",
    "thinking": "think",
}
"""Field of this server -> its name in this protocol."""

MAGIC = {"/9j/": "jpeg", "R0lG": "gif", "UklG": "webp"}
"""The beginning of base64 for each picture type. Anything else is treated as PNG, and the decoder reports
errors."""


class OllamaRequest(Refusing):
    """Fields of both requests. A chat's in OpenAI's format are refused, and unknown ones ignored, except in
    `options`."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        name: FOREIGN.get(name, ())
        for name in ChatRequest.model_fields
        if name not in ("model", "messages", "tools", "stream", "stream_options", "request_id")
        and name not in ("logprobs", "top_logprobs")
    }
    instead: ClassVar[dict[str, str]] = {
        **NAMES,
        **dict.fromkeys(("max_completion_tokens", "n_predict"), "options.num_predict"),
        **dict.fromkeys(("enable_thinking", "chat_template_kwargs"), "think"),
        **dict.fromkeys(("prompt", "system"), "messages"),
        "messages": "prompt",
    }

    model: str = Field("", max_length=LONGEST_NAME)
    stream: bool | None = None
    """Streams unless false."""
    format: Any = None
    """"json", or a schema."""
    think: bool | str | None = None
    keep_alive: Any = None
    """Accepted without effect: the model stays loaded as long as the server runs."""
    options: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    def _fields(self) -> dict[str, Any]:
        """The fields common to chat requests and completions."""
        fields: dict[str, Any] = {"model": self.model or None, "stream": self.stream is not False}
        for name, value in (self.options or {}).items():
            if name in OPTIONS:
                fields[OPTIONS[name]] = value
        limit = fields.get("max_tokens")
        if limit in (-1, -2):  # until the answer or the context ends
            del fields["max_tokens"]
        fields["response_format"] = self._response_format()
        if self.logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        return fields

    def _response_format(self) -> dict[str, Any] | None:
        if self.format in (None, ""):
            return None
        if self.format == "json":
            return {"type": "json_object"}
        if not isinstance(self.format, dict):
            raise bad_request("format", 'must be "json" or a JSON schema')
        return {
            "type": "json_schema",
            "json_schema": {"name": "format", "schema": self.format, "strict": True},
        }

    def _thinking(self) -> dict[str, Any]:
        return {"reasoning_effort" if isinstance(self.think, str) else "thinking": self.think}


class OllamaChatRequest(OllamaRequest):
    """A conversation; without messages, a request to load the model."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **OllamaRequest.unsupported,
        **dict.fromkeys(("prompt", "system"), ("",)),
    }

    messages: list[dict[str, Any]] = Field([], fail_fast=True, max_length=MAX_MESSAGES)
    tools: list[dict[str, Any]] | None = Field(None, fail_fast=True, max_length=MAX_TOOLS)

    def chat(self) -> ChatRequest:
        """The equivalent chat request. Raises ApiError 400."""
        messages = [_message(message, f"messages[{at}]") for at, message in enumerate(self.messages)]
        own = {"messages": messages, "tools": self.tools or None}
        return to_chat({**self._fields(), **self._thinking(), **own}, NAMES)


class OllamaGenerateRequest(OllamaRequest):
    """A question; with `raw` a text that is continued, without a template."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **OllamaRequest.unsupported,
        "suffix": ("",),
        "template": ("",),
        "context": ([],),
        **dict.fromkeys(("messages", "tools"), ([],)),
    }

    prompt: str = ""
    system: str = ""
    images: list[Any] | None = Field(None, fail_fast=True)
    raw: bool | None = None

    def chat(self) -> ChatRequest:
        """The equivalent chat request. Raises ApiError 400."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": self.prompt, "images": self.images}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        fields = {**self._fields(), **self._thinking()}
        return to_chat({**fields, "messages": [_message(each, "") for each in messages]}, NAMES)

    def completion(self) -> CompletionRequest:
        """The equivalent completion, for a raw prompt. Raises ApiError 400."""
        for name in ("system", "images", "think"):
            if getattr(self, name):
                raise refused(name, "not beside raw, which has no template")
        fields = {**self._fields(), "prompt": self.prompt}
        if fields.pop("logprobs", None):
            fields["logprobs"] = fields.pop("top_logprobs") or 0
        try:
            return CompletionRequest.model_validate(
                {name: value for name, value in fields.items() if value is not None}
            )
        except ValidationError as error:
            raise from_validation(error) from error


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A chat request's message."""
    made: dict[str, Any] = {"role": message.get("role"), "content": message.get("content") or ""}
    if images := message.get("images"):
        text = [{"type": "text", "text": made["content"]}] if made["content"] else []
        made["content"] = [*_pictures(images, f"{where}.images".lstrip(".")), *text]
    if message.get("thinking"):
        made["reasoning_content"] = text_in(message["thinking"], f"{where}.thinking")
    if calls := message.get("tool_calls"):
        numbered = enumerate(list_in(calls, f"{where}.tool_calls"))
        made["tool_calls"] = [_call(call, f"{where}.tool_calls[{at}]", at) for at, call in numbered]
    if made["role"] == "tool":
        made["tool_call_id"] = message.get("tool_call_id") or message.get("tool_name") or "call_0"
    return made


def _pictures(images: Any, where: str) -> Iterator[GivenPicture]:
    for at, image in enumerate(list_in(images, where)):
        data = text_in(image, f"{where}[{at}]")
        kind = MAGIC.get(data[:4], "png")
        yield GivenPicture(f"data:image/{kind};base64,{data}", f"{where}[{at}]")


def _call(call: Any, where: str, at: int) -> dict[str, Any]:
    given = object_in(object_in(call, where).get("function"), f"{where}.function")
    arguments = given.get("arguments") or {}
    if not isinstance(arguments, str):
        arguments = dict(object_in(arguments, f"{where}.function.arguments"))
    function = {"name": text_in(given.get("name"), f"{where}.function.name"), "arguments": arguments}
    return {"id": call.get("id") or f"call_{at}", "type": "function", "function": function}
