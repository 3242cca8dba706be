"""Anthropic's Messages: /v1/messages, whole or streamed, and /v1/messages/count_tokens."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

from fastapi.responses import JSONResponse
from pydantic_core import from_json
from sse_starlette import ServerSentEvent

from server.api.chat import begin, prompt_of
from server.api.request import LARGE_JSON, on_thread, prepared
from server.api.sse import Dialect, Frame, typed_event
from server.api.tokens import bounded
from server.chat import Arguments, Content, Reasoning, ToolCall

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from fastapi import Request, Response

    from server.api.messages_protocol import CountTokensRequest, MessagesRequest
    from server.api.service import Service
    from server.api.serving import ServedRequest
    from server.chat import Reply

DIALECT = Dialect(
    failure=lambda error: typed_event(error.anthropic_body()),
    ping=lambda: ServerSentEvent('{"type":"ping"}', event="ping", sep="\n"),
)

Block = dict[str, Any]


async def messages(http: Request, service: Service, request: MessagesRequest, size: int) -> Response:
    """Answers with a message; `size` is the body's, in bytes."""
    asked = await on_thread(request.chat, size, LARGE_JSON)
    served, [reply] = await begin(http, service, asked, size, "msg_")
    return await served.respond(
        http, partial(stream, served, reply), partial(collect, served, reply), DIALECT
    )


async def count_tokens(http: Request, service: Service, request: CountTokensRequest, size: int) -> Response:
    """How many tokens the conversation's prompt has, those of the cache included."""

    def answer(interrupt: Callable[[], None]) -> Response:
        ids, _ = prompt_of(service, request.chat(), bounded(interrupt, "messages"))
        return JSONResponse({"input_tokens": len(ids)})

    return await prepared(http, answer, size)


async def collect(served: ServedRequest, reply: Reply) -> dict[str, Any]:
    """The whole message."""
    content: list[Block] = []
    json_texts: dict[int, str] = {}
    async for part in reply:
        block = content[-1] if content else {}
        match part:
            case Reasoning(text):
                if block.get("type") != "thinking":
                    content.append(block := opened(served, part))
                    block["signature"] = served.id
                block["thinking"] += text
            case Content(text):
                if block.get("type") != "text":
                    content.append(block := opened(served, part))
                block["text"] += text
            case ToolCall():
                content.append(opened(served, part))
                json_texts[len(content) - 1] = ""
            case Arguments(_, text):
                json_texts[len(content) - 1] += text
    for index, text in json_texts.items():
        # the last call may be cut off by the limit: the part that is there, as Anthropic's clients read it
        content[index]["input"] = from_json(text, allow_partial="trailing-strings")
    return {**envelope(served), "content": content, **ending(served, reply), "usage": usage(reply)}


async def stream(served: ServedRequest, reply: Reply) -> AsyncGenerator[bytes, None]:
    """The message as events. It starts with its first token, once it is known how much was cached."""
    index = -1
    open_type = ""

    def started() -> bytes:
        message = {**envelope(served), "content": [], "stop_reason": None, "stop_sequence": None}
        start = {
            "type": "message_start",
            "message": {**message, "usage": {**usage(reply), "output_tokens": 0}},
        }
        return typed_event(start) + typed_event({"type": "ping"})

    def delta(index: int, kind: str, field: str, text: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": index, "delta": {"type": kind, field: text}}

    @cache
    def frame(index: int, kind: str, field: str) -> Frame:
        return Frame(partial(delta, index, kind, field), typed_event)

    def closed() -> bytes:
        """The end of the open block; a signature completes a thinking block."""
        if index < 0:
            return b""
        stop = typed_event({"type": "content_block_stop", "index": index})
        if open_type == "thinking":
            return typed_event(delta(index, "signature_delta", "signature", served.id)) + stop
        return stop

    async for part in reply:
        before = b"" if index >= 0 else started()
        match part:
            case Reasoning(text):
                block_type, delta_type, field = "thinking", "thinking_delta", "thinking"
            case Content(text):
                block_type, delta_type, field = "text", "text_delta", "text"
            case Arguments(_, text):
                block_type, delta_type, field = "tool_use", "input_json_delta", "partial_json"
            case ToolCall():
                block_type, text = "tool_use", ""
        if block_type != open_type or isinstance(part, ToolCall):
            before += closed()
            index, open_type = index + 1, block_type
            start = {"type": "content_block_start", "index": index, "content_block": opened(served, part)}
            before += typed_event(start)
        yield before + (frame(index, delta_type, field).filled(text) if text else b"")
    last = {
        "type": "message_delta",
        "delta": ending(served, reply),
        "usage": usage(reply),
    }
    yield (closed() if index >= 0 else started()) + typed_event(last) + typed_event({"type": "message_stop"})


def opened(served: ServedRequest, part: Reasoning | Content | ToolCall | Arguments) -> Block:
    """A content block, as yet empty, for this part of a reply."""
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
    """Why the message ended. Raises ApiError 503 where the server cut it short."""
    reason = served.check(reply.finish_reason)
    stopped_by = reply.generation.stop_string if reason == "stop" else None
    named = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    return {
        "stop_reason": named[reason] if stopped_by is None else "stop_sequence",
        "stop_sequence": stopped_by,
    }


def usage(reply: Reply) -> dict[str, int]:
    """Tokens so far. As Anthropic counts, `input_tokens` are those that the cache did not have."""
    generation = reply.generation
    return {
        "input_tokens": generation.prompt_tokens - generation.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": generation.cached_tokens,
        "output_tokens": generation.completion_tokens,
    }
