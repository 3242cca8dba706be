"""OpenAI's Responses: /v1/responses, whole or streamed. The server stores nothing between requests."""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any, Literal
from uuid import uuid4

from fastapi import Response

from qwen_serve.server.api.context import RequestContext
from qwen_serve.server.api.errors import ApiError
from qwen_serve.server.api.formats.left_out import noted
from qwen_serve.server.api.formats.responses.request import NAMES, ResponsesRequest
from qwen_serve.server.api.formats.translation import begun
from qwen_serve.server.api.logprobs import ResponseLogprobs
from qwen_serve.server.api.request import on_thread
from qwen_serve.server.api.serving import ServedRequest, prompt_details
from qwen_serve.server.api.sse import EventWriter, encode, typed_event
from qwen_serve.server.chat import Arguments, Content, Part, Reasoning, Reply, ToolCall

Item = dict[str, Any]
Event = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]

SUMMARY = "response.reasoning_summary"
"""Prefix of the names of events that carry the reasoning as its summary."""


async def respond(context: RequestContext, request: ResponsesRequest) -> Response:
    """Answer a conversation, as OpenAI's Responses API does; nothing is kept."""
    asked = await on_thread(request.chat, context.body.size)
    request.input = None  # frees the input for the time of the answer
    served, reply = await begun(context, asked, "resp_", NAMES)
    answer = Answer(request, served, reply)
    return noted(await served.respond([reply], answer, answer.collect), request.tools_left_out)


class Answer(EventWriter):
    """One response under construction; its events are numbered."""

    def __init__(self, request: ResponsesRequest, served: ServedRequest, reply: Reply) -> None:
        self._request = request
        self._served = served
        self._reply = reply
        logprobs = ResponseLogprobs(request.n_top_logprobs, served.vocab, reply.generation)
        self._output = Output(logprobs, request.offered.names, summarized=request.wants_summary)
        self._sent = 0

    async def collect(self) -> bytes:
        async for part in self._reply:
            for _ in self._output.add(part):
                pass
        status = self._status()
        for _ in self._output.close(status):
            pass
        return await self._served.written(lambda: encode(self._object(status)))

    def begin(self) -> bytes:
        kinds = ("response.created", "response.in_progress")
        return self._numbered({"type": kind, "response": self._object()} for kind in kinds)

    async def write(self, index: int, part: Part | None) -> bytes:
        if part is None:
            return b""
        write = partial(self._numbered, self._output.add(part))
        # a call ends the text before it, whose log-probabilities are then all sent again
        return await self._served.written(write) if isinstance(part, ToolCall) else write()

    async def end(self) -> bytes:
        status = self._status()
        whole = {"type": f"response.{status}", "response": self._object(status)}
        last = chain(self._output.close(status), [whole])
        return await self._served.written(lambda: self._numbered(last))

    def failure(self, error: ApiError) -> bytes:
        failure = {"code": "server_error", "message": error.message}
        response = {**self._object(), "status": "failed", "error": failure}
        return self._numbered([{"type": "response.failed", "response": response}])

    def _numbered(self, events: Iterable[Event]) -> bytes:
        """Events for the wire."""
        written = []
        for event in events:
            kind = event.pop("type")
            written.append(typed_event({"type": kind, "sequence_number": self._sent, **event}))
            self._sent += 1
        return b"".join(written)

    def _status(self) -> Status:
        """The response's status. Raises ApiError 503 if the server cut the answer short."""
        return "incomplete" if self._served.check(self._reply.finish_reason) == "length" else "completed"

    def _object(self, status: Status = "in_progress") -> dict[str, Any]:
        """The response so far, with the request's settings."""
        asked = self._request
        text = asked.text
        ended = status != "in_progress"
        return {
            "id": self._served.id,
            "object": "response",
            "created_at": self._served.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": self._served.model,
            "output": self._output.items if ended else [],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {
                "effort": asked.reasoning.effort if asked.reasoning else None,
                "summary": asked.reasoning.summary if asked.reasoning else None,
            },
            "service_tier": self._served.service_tier,
            "store": False,
            "temperature": asked.temperature,
            "text": {"format": (text.format if text else None) or {"type": "text"}},
            "tool_choice": "auto" if asked.tool_choice is None else asked.tool_choice,
            "tools": asked.offered.shown,
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": asked.top_p,
            "truncation": asked.truncation or "disabled",
            "usage": self._usage() if ended else None,
            "user": asked.user,
            "metadata": {
                **(asked.metadata or {}),
                **({"tools_left_out": asked.tools_left_out} if asked.tools_left_out else {}),
            },
        }

    def _usage(self) -> dict[str, Any]:
        generation = self._reply.generation
        return {
            "input_tokens": generation.request.prompt_length,
            "input_tokens_details": prompt_details(
                generation.request.cached_tokens, generation.request.pictures.n_rows
            ),
            "output_tokens": generation.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": generation.reasoning_tokens or 0},
            "total_tokens": generation.request.prompt_length + generation.completion_tokens,
        }


class Output:
    """A response's items under construction. Each change yields events, which the caller must consume."""

    def __init__(
        self, logprobs: ResponseLogprobs, names: Callable[[str], dict[str, str]], *, summarized: bool
    ) -> None:
        """`names` gives a call item's fields for the called tool; `summarized` also sends the reasoning as
        its summary."""
        self.items: list[Item] = []
        self._names = names
        self._logprobs = logprobs
        self._summarized = summarized

    def add(self, part: Part) -> Iterator[Event]:
        match part:
            case Reasoning(text):
                self._logprobs.skip(text)
                yield from self._text("reasoning", text)
            case Content(text):
                yield from self._text("message", text)
            case ToolCall():
                yield from self.close("completed")
                names = {"call_id": part.id, **self._names(part.name), "arguments": ""}
                yield from self._open({"type": "function_call", "id": _id("fc"), **names})
            case Arguments(_, text):
                self.items[-1]["arguments"] += text
                yield {"type": "response.function_call_arguments.delta", **self._place(), "delta": text}
                if part.last:
                    self._logprobs.skip("</tool_call>")
                    yield from self.close("completed")

    def close(self, status: Status) -> Iterator[Event]:
        """Closes the open item, if there is one."""
        item = self.items[-1] if self.items else {}
        if item.get("status") != "in_progress":
            return
        item["status"] = status
        if item["type"] == "function_call":
            whole = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **self._place(), **whole}
        else:
            [part] = item["content"]
            place = {**self._place(), "content_index": 0}
            yield {
                "type": f"{_stream_of(item)}.done",
                **place,
                **{key: part[key] for key in ("text", "logprobs") if key in part},
            }
            yield {"type": "response.content_part.done", **place, "part": part}
            for summary in item.get("summary", []):
                place = {**self._place(), "summary_index": 0}
                yield {"type": f"{SUMMARY}_text.done", **place, "text": summary["text"]}
                yield {"type": f"{SUMMARY}_part.done", **place, "part": summary}
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _text(self, kind: str, text: str) -> Iterator[Event]:
        item = self.items[-1] if self.items else {}
        if item.get("type") != kind or item["status"] != "in_progress":
            yield from self.close("completed")
            if kind == "reasoning":
                item = {"type": kind, "id": _id("rs"), "summary": []}
                part: Item = {"type": "reasoning_text", "text": ""}
            else:
                item = {"type": kind, "id": _id("msg"), "role": "assistant"}
                part = {"type": "output_text", "text": "", "annotations": []}
                part["logprobs"] = self._logprobs.written([])
            yield from self._open({**item, "content": []})
            item = self.items[-1]
            place = {**self._place(), "content_index": 0}
            yield {"type": "response.content_part.added", **place, "part": part}
            item["content"].append(part)
            if kind == "reasoning" and self._summarized:
                summary = {"type": "summary_text", "text": ""}
                place = {**self._place(), "summary_index": 0}
                yield {"type": f"{SUMMARY}_part.added", **place, "part": summary}
                item["summary"].append(summary)
        [part] = item["content"]
        part["text"] += text
        more: Item = {}
        if kind == "message":
            more["logprobs"] = self._logprobs.written(self._logprobs.of(text))
            part["logprobs"].items += more["logprobs"].items
        place = {**self._place(), "content_index": 0}
        yield {"type": f"{_stream_of(item)}.delta", **place, "delta": text, **more}
        for summary in item.get("summary", []):
            summary["text"] += text
            place = {**self._place(), "summary_index": 0}
            yield {"type": f"{SUMMARY}_text.delta", **place, "delta": text}

    def _open(self, item: Item) -> Iterator[Event]:
        self.items.append({**item, "status": "in_progress"})
        empty: Item = {name: [] for name in ("content", "summary") if name in item}
        shown = {**self.items[-1], **empty}
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": shown}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def _stream_of(item: Item) -> str:
    """The name of the events that carry an item's text."""
    return "response.reasoning_text" if item["type"] == "reasoning" else "response.output_text"


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid4().hex}"
