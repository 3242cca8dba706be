"""Anthropic's Messages requests, and their translation to chat requests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from qwen_serve.server.api.errors import bad_request, refused
from qwen_serve.server.api.fields.generation import TokenLimit
from qwen_serve.server.api.formats.chat import ChatRequest
from qwen_serve.server.api.formats.left_out import LEFT, names_of
from qwen_serve.server.api.formats.translation import (
    FOREIGN,
    Sharing,
    blocks_in,
    spoken,
    to_chat,
)
from qwen_serve.server.chat import plain_text
from qwen_serve.server.chat.errors import object_in, text_in
from qwen_serve.server.chat.pictures import GivenPicture

NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
"""Field of a chat request -> its name in this protocol."""

MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")

BILLING = "x-anthropic-billing-header:"
_PER_REQUEST = re.compile(r"(?<=\bcch=)[^;\s]+")
_PER_CONVERSATION = re.compile(r"(\bcc_version=\d+\.\d+\.\d+)\.\w+")


class ThinkingConfig(BaseModel):
    """How much to think. `adaptive` leaves the length to the model."""

    model_config = ConfigDict(strict=True)

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None
    """`omitted`: the answer comes without its reasoning. There are no summaries: it comes as it is."""

    def chat(self) -> dict[str, Any]:
        """The chat request's `thinking`."""
        kind = "disabled" if self.type == "disabled" else "enabled"
        budget = {} if self.budget_tokens is None else {"budget_tokens": self.budget_tokens}
        return {"type": kind, **budget}


class ToolChoice(BaseModel):
    """Which tools may or must be called."""

    model_config = ConfigDict(strict=True)

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> ToolChoice:
        if self.type == "tool" and not self.name:
            raise ValueError('name: needed where the type is "tool"')
        return self

    def chat(self) -> Any:
        """The chat request's `tool_choice`."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class OutputConfig(BaseModel):
    """Format of the answer, and effort."""

    model_config = ConfigDict(strict=True)

    effort: str | None = None
    format: dict[str, Any] | None = None

    def response_format(self) -> dict[str, Any] | None:
        """The chat request's `response_format`."""
        if self.format is None:
            return None
        if self.format.get("type") != "json_schema":
            raise bad_request("output_config.format.type", 'must be "json_schema"')
        return {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": self.format.get("schema"), "strict": True},
        }


class CountTokensRequest(Sharing):
    """A conversation, as /v1/messages/count_tokens and /v1/messages accept it.

    Unknown fields are ignored, and so are those without effect on the answer: `metadata`, `cache_control`
    (the prefix cache needs no marks), `context_management`.
    """

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "mcp_servers": ([],),
        "container": (),
        "thread": (),
        "compaction": (),
    }
    instead: ClassVar[dict[str, str]] = NAMES

    model: str | None = None
    messages: list[dict[str, Any]] = Field(fail_fast=True)
    system: Any = None
    """A string or text blocks."""
    tools: list[dict[str, Any]] | None = Field(None, fail_fast=True)
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    """The former place of `output_config.format`, in the structured outputs beta."""

    @model_validator(mode="after")
    def _one_format(self) -> Self:
        if self.output_format is not None:
            config = self.output_config or OutputConfig()
            if config.format not in (None, self.output_format):
                raise bad_request("output_format", "is not output_config.format; give one of them")
            self.output_config = config.model_copy(update={"format": self.output_format})
        return self

    def chat(self) -> ChatRequest:
        """The equivalent chat request. Raises ApiError 400."""
        return to_chat(self._fields(), NAMES)

    def _fields(self) -> dict[str, Any]:
        config = self.output_config or OutputConfig()
        choice = self.tool_choice
        thinking = self.thinking.chat() if self.thinking else None
        single = choice is not None and choice.disable_parallel_tool_use
        omitted = self.thinking is not None and self.thinking.display == "omitted"
        return {
            **self._shared,
            **({"include_reasoning": False} if omitted else {}),
            "model": self.model,
            "messages": reminded([*self._system(), *self._messages()]),
            "tools": [
                _tool(tool, f"tools[{index}]")
                for index, tool in enumerate(self.tools or [])
                if _is_function(tool)
            ]
            or None,
            "tool_choice": self._choice(),
            "parallel_tool_calls": False if single else None,
            "thinking": thinking,
            # an effort alone does not make Anthropic's models think
            "reasoning_effort": config.effort if thinking and thinking["type"] == "enabled" else None,
            "response_format": config.response_format(),
        }

    @property
    def tools_left_out(self) -> str:
        """Names of the tools that only Anthropic runs, or that only its models are trained to call."""
        return names_of(tool for tool in self.tools or [] if not _is_function(tool))

    def _choice(self) -> Any:
        """The chat request's `tool_choice`, which cannot force a tool that is left out."""
        choice, tools = self.tool_choice, self.tools or []
        if choice is None:
            return None
        named = [tool for tool in tools if choice.type == "any" or tool.get("name") == choice.name]
        forced = choice.type in ("any", "tool") and not any(map(_is_function, named))
        if forced and (left := names_of(named)):
            raise refused("tool_choice", f"asks for a call of {left}: {LEFT}")
        return choice.chat()

    def _system(self) -> Iterator[dict[str, Any]]:
        if self.system is None:
            return
        texts = [_text(block, where) for where, block in blocks_in(self.system, "system")]
        yield {"role": "system", "content": "\n\n".join(map(steady, filter(None, texts)))}

    def _messages(self) -> Iterator[dict[str, Any]]:
        if not self.messages:
            raise bad_request("messages", "at least one is needed")
        for index, message in enumerate(self.messages):
            where = f"messages[{index}]"
            role = message.get("role")
            if role == "assistant":
                yield from _assistant(message, where)
            elif role in ("user", "system"):
                yield from _given(message, where)
            else:
                raise bad_request(f"{where}.role", f'must be "user" or "assistant", not {role!r}')


class MessagesRequest(CountTokensRequest):
    """A conversation to answer."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **CountTokensRequest.unsupported,
        **{name: values for name, values in FOREIGN.items() if name not in ("messages", "max_tokens")},
    }

    max_tokens: TokenLimit
    stop_sequences: list[str] | None = Field(None, fail_fast=True)
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    def _fields(self) -> dict[str, Any]:
        own = ("max_tokens", "stream", "temperature", "top_p", "top_k")
        return {
            **super()._fields(),
            **{name: getattr(self, name) for name in own},
            "service_tier": "default" if self.service_tier == "standard_only" else self.service_tier,
            **({} if self.stop_sequences is None else {"stop": self.stop_sequences}),
        }


def steady(text: str) -> str:
    """A system text in which those parts of Claude Code's that change are replaced by constants.

    Its first block ends in `cch=`, a nonce, and its version in a hash of the conversation. With these, no
    prompt would share a prefix with the one before (llama.cpp masks the nonce, too:
    ggml-org/llama.cpp#21793).
    """
    if not text.startswith(BILLING):
        return text
    header, line, rest = text.partition("\n")
    return _PER_CONVERSATION.sub(r"\1", _PER_REQUEST.sub("0", header)) + line + rest


def reminded(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, in which each later system message becomes a reminder in the user's or tool's turn before
    it.

    Claude Code sometimes adds such a message. At the beginning, where Qwen's template puts system messages,
    it would change the prompt from its first token on; as a turn of its own it would look like a new
    question.
    """
    made: list[dict[str, Any]] = []
    reminders: dict[int, list[str]] = {}
    """Reminders by the turn that they belong to."""
    begun = False
    for message in messages:
        begun = begun or message["role"] != "system"
        if not begun or message["role"] != "system":
            made.append(message)
            continue
        if made[-1]["role"] == "assistant":
            made.append({"role": "user", "content": ""})
        texts = reminders.setdefault(len(made) - 1, [])
        texts.append(f"<system-reminder>\n{plain_text(message['content'])}\n</system-reminder>")
    for turn, texts in reminders.items():
        content = made[turn]["content"]
        if any(isinstance(part, GivenPicture) for part in content):
            content = [*content, {"type": "text", "text": "\n\n".join(["", *texts])}]
        else:
            content = "\n\n".join(filter(None, [plain_text(content), *texts]))
        made[turn] = {**made[turn], "content": content}
    return made


def _given(message: Mapping[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """A user's turn, with tool results as messages of their own."""
    parts: list[dict[str, str] | GivenPicture] = []
    for place, block in blocks_in(message.get("content"), f"{where}.content"):
        if block.get("type") == "tool_result":
            if parts:
                yield {"role": message["role"], "content": parts}
                parts = []
            yield _tool_result(block, place)
        else:
            part = _part(block, place) if message["role"] == "user" else _text(block, place)
            parts.append({"type": "text", "text": part} if isinstance(part, str) else part)
    if parts:
        yield {"role": message["role"], "content": parts}


def _tool_result(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    content = block.get("content")
    parts = [_part(part, place) for place, part in blocks_in(content or "", f"{where}.content")]
    id_ = text_in(block.get("tool_use_id"), f"{where}.tool_use_id")
    return {"role": "tool", "tool_call_id": id_, "content": spoken(parts)}


def _assistant(message: Mapping[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """An assistant's turn; a result of Anthropic's own tools divides it."""
    content = ""
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []

    def turn() -> dict[str, Any]:
        made: dict[str, Any] = {"role": "assistant", "content": content}
        if thoughts:
            made["reasoning_content"] = "\n\n".join(thoughts)
        return {**made, "tool_calls": calls} if calls else made

    for place, block in blocks_in(message.get("content"), f"{where}.content"):
        match block.get("type"):
            case "thinking":
                thoughts.append(text_in(block.get("thinking"), f"{place}.thinking"))
            case "redacted_thinking":
                pass  # only its author can read it
            case "tool_use" | "server_tool_use" | "mcp_tool_use":
                calls.append(_tool_use(block, place))
            case str() as kind if kind.endswith("_tool_result"):
                yield turn()
                content, thoughts, calls = "", [], []
                yield _hosted_result(block, place)
            case "container_upload":
                pass  # a file of Anthropic's, which nobody else has
            case _:
                content += _text(block, place)
    yield turn()


def _hosted_result(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The result of a tool that Anthropic ran, as its text or, without what is encrypted, as JSON."""
    found = (
        [
            one.get("text")
            if one.get("type") == "text"
            else json.dumps(
                {key: one[key] for key in one if not key.startswith("encrypted")}, ensure_ascii=False
            )
            for one in block["content"]
            if isinstance(one, dict)
        ]
        if isinstance(block.get("content"), list)
        else [json.dumps(block.get("content"), ensure_ascii=False)]
    )
    id_ = text_in(block.get("tool_use_id"), f"{where}.tool_use_id")
    return {"role": "tool", "tool_call_id": id_, "content": "\n".join(map(str, found))}


def _tool_use(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = block.get("input") or {}
    arguments = given if isinstance(given, str) else dict(object_in(given, f"{where}.input"))
    function = {"name": text_in(block.get("name"), f"{where}.name"), "arguments": arguments}
    return {"id": text_in(block.get("id"), f"{where}.id"), "type": "function", "function": function}


def _part(block: Mapping[str, Any], where: str) -> str | GivenPicture:
    """A text or picture block of the input."""
    if block.get("type") != "image":
        return _text(block, where)
    where = f"{where}.source"
    source = object_in(block.get("source"), where)
    match source.get("type"):
        case "base64":
            if (kind := source.get("media_type")) not in MEDIA_TYPES:
                raise bad_request(f"{where}.media_type", f"must be one of {', '.join(MEDIA_TYPES)}")
            data = text_in(source.get("data"), f"{where}.data")
            return GivenPicture(f"data:{kind};base64,{data}", f"{where}.data")
        case "url":
            return GivenPicture(text_in(source.get("url"), f"{where}.url"), f"{where}.url")
        case "file":
            raise refused(f"{where}.file_id", "this server keeps no files; send the picture in base64")
    raise bad_request(f"{where}.type", 'must be "base64" or "url"')


def _text(block: Mapping[str, Any], where: str) -> str:
    match kind := block.get("type"):
        case "text":
            return text_in(block.get("text"), f"{where}.text")
        case "document":
            return _document(block, where)
        case "search_result":
            texts = [
                _text(part, place) for place, part in blocks_in(block.get("content"), f"{where}.content")
            ]
            head = [block[key] for key in ("title", "source") if isinstance(block.get(key), str)]
            return "\n".join([*head, *texts])
        case "tool_reference":
            return text_in(block.get("tool_name"), f"{where}.tool_name")
        case "compaction":
            return text_in(block.get("content") or "", f"{where}.content")
    raise refused(f"{where}.type", f"{kind!r} blocks are not supported here")


def _document(block: Mapping[str, Any], where: str) -> str:
    """The text of a document block, after its title and context."""
    where = f"{where}.source"
    source = object_in(block.get("source"), where)
    match source.get("type"):
        case "text":
            text = text_in(source.get("data"), f"{where}.data")
        case "content":
            parts = blocks_in(source.get("content"), f"{where}.content")
            text = "\n".join(_text(part, place) for place, part in parts)
        case kind:
            raise refused(f"{where}.type", f"{kind!r} documents are not supported here; send their text")
    head = [block[key] for key in ("title", "context") if isinstance(block.get(key), str)]
    return "\n\n".join([*head, text])


def _is_function(tool: Mapping[str, Any]) -> bool:
    return tool.get("type") in (None, "custom")


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A tool as a chat request's function."""
    function: dict[str, Any] = {"name": text_in(tool.get("name"), f"{where}.name")}
    if tool.get("description") is not None:
        function["description"] = text_in(tool["description"], f"{where}.description")
    # in the order that the model knows: the template writes the object as it is
    function["parameters"] = dict(object_in(tool.get("input_schema"), f"{where}.input_schema"))
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}
