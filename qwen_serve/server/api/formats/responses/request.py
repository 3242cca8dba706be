"""OpenAI's Responses requests, and their translation to chat requests."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from qwen_serve.server.api.errors import bad_request, refused
from qwen_serve.server.api.fields.generation import TokenLimit
from qwen_serve.server.api.formats.chat import ChatRequest
from qwen_serve.server.api.formats.left_out import LEFT, names_of
from qwen_serve.server.api.formats.responses.offered import OfferedTools, called
from qwen_serve.server.api.formats.translation import (
    FOREIGN,
    Sharing,
    blocks_in,
    spoken,
    to_chat,
)
from qwen_serve.server.chat.documents import text_of_file
from qwen_serve.server.chat.errors import object_in, text_in
from qwen_serve.server.chat.pictures import GivenPicture, PixelBounds, known_detail
from qwen_serve.server.engine import MAX_LOGPROBS

NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Field of a chat request -> its name in this protocol."""

_HOSTED = (
    "local_shell shell web_search tool_search mcp file_search code_interpreter image_generation computer"
)
HOSTED = frozenset(f"{name}_call" for name in _HOSTED.split())
"""Items of calls in a client's own history that are shown as the calls of functions."""

SAID = ("queries", "code", "revised_prompt")
"""What such a call has in place of an action or arguments."""

SILENT = ("additional_tools", "compaction", "compaction_summary", "ghost_snapshot", "mcp_list_tools")
"""Items that are no part of the conversation. (The tools of `additional_tools` are offered.)"""

ROLES = ("user", "assistant", "system", "developer")

TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


class Reasoning(BaseModel):
    """Effort of the reasoning. A requested summary is a copy of the reasoning itself."""

    model_config = ConfigDict(strict=True)

    effort: str | None = None
    context: Literal["auto", "current_turn"] | None = None
    """Qwen's template shows the model the reasoning of the current turn only."""
    mode: Literal["standard"] | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """The former name of `summary`."""


class TextConfig(BaseModel):
    """Format of the answer."""

    model_config = ConfigDict(strict=True)

    format: dict[str, Any] | None = None
    verbosity: str | None = None

    def response_format(self) -> dict[str, Any] | None:
        """The chat request's `response_format`."""
        if self.format is None or self.format.get("type") != "json_schema":
            return self.format
        inner = {name: value for name, value in self.format.items() if name != "type"}
        return {"type": "json_schema", "json_schema": inner}


class ResponsesRequest(Sharing):
    """A conversation to answer. As in vLLM the server stores nothing, even if `store` asks for it, so each
    request has the whole conversation.

    Unknown fields are ignored, and so are those without effect on the answer: `metadata`, `user`,
    `prompt_cache_key`.
    """

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "conversation": (),
        "prompt": (),
        "background": (False,),
        "context_management": ([],),
        **{
            name: values
            for name, values in FOREIGN.items()
            if name not in ("top_logprobs", "parallel_tool_calls")
        },
    }
    instead: ClassVar[dict[str, str]] = {**NAMES, "logprobs": "top_logprobs"}

    model: str | None = None
    input: Any = None
    """A string or items; none beside instructions."""
    instructions: str | None = None
    max_output_tokens: TokenLimit | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = Field(None, fail_fast=True)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = Field(None, fail_fast=True)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    stream: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_memory(cls, body: Any) -> Any:
        if isinstance(body, dict) and body.get("previous_response_id") is not None:
            raise refused(
                "previous_response_id",
                "this server keeps no responses; send the conversation so far as input",
            )
        return body

    @property
    def n_top_logprobs(self) -> int | None:
        """Alternatives with log-probabilities for each token of the text; None for no log-probabilities."""
        included = "message.output_text.logprobs" in (self.include or [])
        return (self.top_logprobs or 0) if included or self.top_logprobs else None

    @property
    def wants_summary(self) -> bool:
        """Whether the reasoning is also sent as its own summary."""
        asked = self.reasoning
        return asked is not None and (asked.summary or asked.generate_summary) not in (None, "none")

    @cached_property
    def offered(self) -> OfferedTools:
        """The part of `tools` that the model is offered. Raises ApiError 400."""
        placed = [(f"tools[{index}]", tool) for index, tool in enumerate(self.tools or [])]
        for index, item in enumerate(self.input if isinstance(self.input, list) else []):
            if isinstance(item, dict) and item.get("type") in ("additional_tools", "tool_search_output"):
                more = blocks_in(item.get("tools") or [], f"input[{index}].tools")
                placed += [(where, dict(tool)) for where, tool in more]
        return OfferedTools(placed)

    @property
    def tools_left_out(self) -> str:
        """Names of the tools that are left out."""
        return self.offered.left_out

    def chat(self) -> ChatRequest:
        """The equivalent chat request. Raises ApiError 400."""
        text = self.text or TextConfig()
        same = ("model", "temperature", "top_p", "parallel_tool_calls", "stream")
        fields = {
            **self._shared,
            **{name: getattr(self, name) for name in same},
            "messages": list(self._messages()),
            "max_tokens": self.max_output_tokens,
            "logprobs": None if self.n_top_logprobs is None else True,
            "top_logprobs": self.n_top_logprobs,
            "tools": self.offered.functions or None,
            "tool_choice": self._tool_choice(),
            "response_format": text.response_format(),
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
        }
        if self.truncation == "auto":
            fields["truncate_prompt_tokens"] = -1
        return to_chat(fields, NAMES)

    def _tool_choice(self) -> Any:
        """The chat request's `tool_choice`, which cannot force a tool that is left out."""
        choice = self.tool_choice
        if choice in ("required", "any") and self.tools_left_out and not self.offered.functions:
            raise refused(
                "tool_choice", f"asks for a call, but only {self.tools_left_out} could be called: {LEFT}"
            )
        if not isinstance(choice, dict):
            return choice
        kind = choice.get("type")
        if kind == "allowed_tools":
            allowed = choice.get("tools")
            if not isinstance(allowed, list):
                return choice
            kept = [
                {**tool, "name": called(tool, f"tool_choice.tools[{index}]")}
                if isinstance(tool, dict)
                else tool
                for index, tool in enumerate(allowed)
                if not isinstance(tool, dict) or tool.get("type") == "function"
            ]
            if kept or not allowed:
                return {**choice, "tools": kept}
            if choice.get("mode") == "auto":
                return "none"
            raise refused("tool_choice.tools", f"asks for a call of {names_of(allowed)}: {LEFT}")
        if kind != "function":
            named = names_of([choice])
            raise refused("tool_choice.type", f"asks for a call of {named}: {LEFT}")
        return {"type": "function", "function": {"name": called(choice, "tool_choice")}}

    def _messages(self) -> Iterator[dict[str, Any]]:
        """The messages; adjacent items of one reply are merged."""
        if self.instructions:
            yield {"role": "system", "content": self.instructions}
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}
            return
        if self.instructions and self.input in (None, []):
            return
        if not isinstance(self.input, list) or not self.input:
            raise bad_request("input", "must be a string or a list of items")
        reply: dict[str, Any] = {}
        for index, item in enumerate(self.input):
            where = f"input[{index}]"
            part, excluding = _item(object_in(item, where), where)
            if part.keys() == {"role"}:
                continue  # what only its author can read, or nothing that was said
            if part["role"] != "assistant":
                if reply:
                    yield reply
                    reply = {}
                yield part
            elif reply and not reply.keys() & excluding:
                calls = reply.get("tool_calls", [])
                calls += part.pop("tool_calls", [])
                reply |= {**part, **({"tool_calls": calls} if calls else {})}
            else:
                if reply:
                    yield reply
                reply = part
        if reply:
            yield reply


def _item(item: Mapping[str, Any], where: str) -> tuple[dict[str, Any], set[str]]:
    """An item as a message. Also, for an assistant's item, the keys that an earlier message must not have, to
    be merged with it."""
    kind = item.get("type", "message")
    match kind:
        case "message":
            role = item.get("role")
            if role not in ROLES:
                raise bad_request(f"{where}.role", f"must be {' or '.join(ROLES)}, not {role!r}")
            if role == "assistant":
                texts = _texts(item.get("content"), f"{where}.content")
                return {"role": role, "content": "".join(texts)}, {"content", "tool_calls"}
            content = [
                {"type": "text", "text": part} if isinstance(part, str) else part
                for part in _parts(item.get("content"), f"{where}.content")
            ]
            return {"role": role, "content": content}, set()
        case "reasoning":
            texts = _texts(item.get("content") or item.get("summary") or [], f"{where}.content")
            kept = {"reasoning_content": "\n\n".join(texts)} if texts else {}
            return {"role": "assistant", **kept}, {"reasoning_content", "content", "tool_calls"}
        case "function_call":
            name = called(item, where)
            arguments, id_ = (text_in(item.get(key), f"{where}.{key}") for key in ("arguments", "call_id"))
            return _call(id_, name, arguments), set()
        case "custom_tool_call":
            text, id_ = (text_in(item.get(key), f"{where}.{key}") for key in ("input", "call_id"))
            return _call(id_, called(item, where), {"input": text}), set()
        case "tool_search_output":
            found = names_of(blocks[1] for blocks in blocks_in(item.get("tools") or [], f"{where}.tools"))
            return {"role": "tool", "tool_call_id": item.get("call_id"), "content": found}, set()
        case str() if kind.endswith("_call_output"):
            id_ = text_in(item.get("call_id") or item.get("id"), f"{where}.call_id")
            output = _parts(item.get("output"), f"{where}.output")
            return {"role": "tool", "tool_call_id": id_, "content": spoken(output)}, set()
        case str() if kind in HOSTED:
            said = {key: item[key] for key in SAID if item.get(key)}
            action: Any = item.get("action") or item.get("arguments") or said
            if not isinstance(action, str):
                action = dict(object_in(action, f"{where}.action"))
            return _call(item.get("call_id") or item.get("id"), kind.removesuffix("_call"), action), set()
        case str() if kind in SILENT or kind.startswith("mcp_approval_"):
            return {"role": "assistant"}, set()
    if kind == "item_reference":
        raise refused(f"{where}.type", "this server keeps no items to refer to; send the item itself")
    raise refused(f"{where}.type", f"{kind!r} items are not supported by this server")


def _call(id_: Any, name: str, arguments: Any) -> dict[str, Any]:
    """An assistant's message with a call."""
    call = {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def _parts(content: Any, where: str) -> list[str | GivenPicture]:
    """The texts and pictures of the input."""
    return [
        _picture(block, place) if block.get("type") == "input_image" else _text(block, place)
        for place, block in blocks_in(content, where, "text")
    ]


def _texts(content: Any, where: str) -> list[str]:
    return [_text(block, place) for place, block in blocks_in(content, where, "text")]


def _text(block: Mapping[str, Any], where: str) -> str:
    kind = block.get("type")
    if kind == "refusal":
        return text_in(block.get("refusal"), f"{where}.refusal")
    if kind in TEXTS:
        return text_in(block.get("text"), f"{where}.text")
    if kind == "input_file":
        return text_of_file(block, where)
    raise refused(f"{where}.type", f"{kind!r} is not supported here")


def _picture(block: Mapping[str, Any], where: str) -> GivenPicture:
    if block.get("file_id") is not None:
        raise refused(f"{where}.file_id", "this server keeps no files; send the picture in image_url")
    place = f"{where}.image_url"
    return GivenPicture(
        text_in(block.get("image_url"), place),
        place,
        known_detail(block.get("detail"), where),
        PixelBounds.of(block, where),
    )
