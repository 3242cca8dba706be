"""Anthropic's Messages: /v1/messages, whole or streamed, and /v1/messages/count_tokens."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from fastapi import Response
from pydantic_core import from_json
from sse_starlette import ServerSentEvent

from qwen_serve.server.api.context import RequestContext
from qwen_serve.server.api.errors import ApiError
from qwen_serve.server.api.formats.left_out import noted
from qwen_serve.server.api.formats.messages.request import NAMES, CountTokensRequest, MessagesRequest
from qwen_serve.server.api.formats.translation import begun
from qwen_serve.server.api.request import on_thread
from qwen_serve.server.api.serving import ServedRequest
from qwen_serve.server.api.sse import EventWriter, encode, typed_event
from qwen_serve.server.api.tokens import with_prompt
from qwen_serve.server.chat import Arguments, Content, Part, Reasoning, Reply, ToolCall

Block = dict[str, Any]
Event = dict[str, Any]


async def messages(context: RequestContext, request: MessagesRequest) -> Response:
    """Answer a conversation, as Anthropic's Messages API does."""
    asked = await on_thread(request.chat, context.body.size)
    request.messages = []  # frees the messages for the time of the answer
    served, reply = await begun(context, asked, "msg_", NAMES)
    response = await served.respond([reply], MessageWriter(served, reply), partial(collect, served, reply))
    return noted(response, request.tools_left_out)


async def count_tokens(context: RequestContext, request: CountTokensRequest) -> Response:
    """Count the tokens of a conversation's prompt, cached ones included."""
    asked = await on_thread(request.chat, context.body.size)
    return await with_prompt(context, asked, lambda ids: {"input_tokens": len(ids)})


async def collect(served: ServedRequest, reply: Reply) -> bytes:
    message = Message(served)
    async for part in reply:
        for _ in message.add(part):
            pass
    for _ in message.close():
        pass
    whole = {
        **envelope(served),
        "content": message.content,
        **ending(served, reply),
        "usage": usage(served, reply),
    }
    return encode(whole)


class MessageWriter(EventWriter):
    """The message as events. It starts with the first token, when the number of cached tokens is known."""

    def __init__(self, served: ServedRequest, reply: Reply) -> None:
        self._served, self._reply = served, reply
        self._message = Message(served)
        self._begun = False

    def _start(self) -> Iterator[Event]:
        if not self._begun:
            self._begun = True
            whole = {**envelope(self._served), "content": [], "stop_reason": None, "stop_sequence": None}
            whole["usage"] = {**usage(self._served, self._reply), "output_tokens": 0}
            yield {"type": "message_start", "message": whole}
            yield {"type": "ping"}

    async def write(self, index: int, part: Part | None) -> bytes:
        events = [] if part is None else [*self._start(), *self._message.add(part)]
        return b"".join(map(typed_event, events))

    async def end(self) -> bytes:
        last = {"type": "message_delta", "delta": ending(self._served, self._reply)}
        last["usage"] = usage(self._served, self._reply)
        events = [*self._start(), *self._message.close(), last, {"type": "message_stop"}]
        return b"".join(map(typed_event, events))

    def failure(self, error: ApiError) -> bytes:
        return typed_event(error.anthropic_body())

    def ping(self) -> ServerSentEvent:
        return ServerSentEvent(encode({"type": "ping"}).decode(), event="ping", sep="\n")


class Message:
    """A message's content blocks as they grow. Each change yields events, which the caller must consume."""

    def __init__(self, served: ServedRequest) -> None:
        self._served = served
        self.content: list[Block] = []
        self._json = ""
        """The open call's arguments so far."""

    def add(self, part: Part) -> Iterator[Event]:
        match part:
            case Reasoning(text):
                kind, delta = "thinking", {"type": "thinking_delta", "thinking": text}
            case Content(text):
                kind, delta = "text", {"type": "text_delta", "text": text}
            case Arguments(_, text):
                kind, delta = "tool_use", {"type": "input_json_delta", "partial_json": text}
            case ToolCall():
                kind, text = "tool_use", ""
        if not self.content or self.content[-1]["type"] != kind or isinstance(part, ToolCall):
            yield from self.close()
            self.content.append(opened(part))
            block = dict(self.content[-1])
            yield {"type": "content_block_start", "index": len(self.content) - 1, "content_block": block}
        if text:
            if kind == "tool_use":
                self._json += text
            else:
                self.content[-1][kind] += text
            yield self._delta(delta)

    def close(self) -> Iterator[Event]:
        """Closes the open block; a signature completes a thinking block."""
        if not self.content:
            return
        block = self.content[-1]
        if block["type"] == "thinking":
            block["signature"] = self._served.id
            yield self._delta({"type": "signature_delta", "signature": self._served.id})
        elif block["type"] == "tool_use":
            # the limit may cut off the last call; Anthropic's clients read the incomplete arguments
            block["input"] = from_json(self._json or "{}", allow_partial="trailing-strings")
            self._json = ""
        yield {"type": "content_block_stop", "index": len(self.content) - 1}

    def _delta(self, delta: dict[str, str]) -> Event:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}


def opened(part: Part) -> Block:
    """An empty content block for this part of a reply."""
    match part:
        case Reasoning():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case ToolCall():
            id_ = part.id.replace("call_", "toolu_", 1)
            return {"type": "tool_use", "id": id_, "name": part.name, "input": {}}
    return {"type": "text", "text": ""}


def envelope(served: ServedRequest) -> dict[str, Any]:
    return {"id": served.id, "type": "message", "role": "assistant", "model": served.model}


def ending(served: ServedRequest, reply: Reply) -> dict[str, Any]:
    """The stop reason. Raises ApiError 503 if the server cut the message short."""
    reason = served.check(reply.finish_reason)
    stopped_by = reply.generation.stop_string if reason == "stop" else None
    named = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    return {
        "stop_reason": named[reason] if stopped_by is None else "stop_sequence",
        "stop_sequence": stopped_by,
    }


TIERS = {"priority": "priority", "default": "standard", "flex": "batch"}
"""Service tiers under Anthropic's names."""


def usage(served: ServedRequest, reply: Reply) -> dict[str, Any]:
    """Token usage so far. As in Anthropic's API, `input_tokens` excludes cached tokens."""
    generation = reply.generation
    return {
        "input_tokens": generation.request.prompt_length - generation.request.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": generation.request.cached_tokens,
        "output_tokens": generation.completion_tokens,
        "service_tier": TIERS[served.service_tier],
    }
