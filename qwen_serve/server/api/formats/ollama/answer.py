"""Ollama's answers: /api/chat and /api/generate, whole or as lines of JSON."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse
from pydantic_core import from_json

from qwen_serve.server.api.context import RequestContext
from qwen_serve.server.api.errors import ApiError
from qwen_serve.server.api.fields.lora import known_model
from qwen_serve.server.api.formats import completions
from qwen_serve.server.api.formats.ollama.request import NAMES, OllamaChatRequest, OllamaGenerateRequest
from qwen_serve.server.api.formats.translation import begun
from qwen_serve.server.api.logprobs import ChatLogprobs
from qwen_serve.server.api.request import ensure_loaded, on_thread
from qwen_serve.server.api.serving import ServedRequest
from qwen_serve.server.api.sse import EventWriter, encode
from qwen_serve.server.chat import Arguments, Content, Part, Reasoning, Reply, TextGeneration, ToolCall

Shape = dict[str, Any]

PREFIX = "ollama-"


def as_message(text: str = "", thinking: str = "", calls: list[Shape] | None = None) -> Shape:
    """An answer, or a part of one, in /api/chat's form."""
    message: Shape = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


def as_response(text: str = "", thinking: str = "", calls: list[Shape] | None = None) -> Shape:
    """`as_message` in /api/generate's form, which has no tools."""
    return {"response": text, **({"thinking": thinking} if thinking else {})}


async def ollama_chat(context: RequestContext, request: OllamaChatRequest) -> Response:
    """Answer a conversation, as Ollama does: in lines of JSON, unless `stream` is false."""
    if not request.messages:
        return await loaded(context, request.model, as_message())
    asked = await on_thread(request.chat, context.body.size)
    request.messages = []  # frees the messages for the time of the answer
    served, reply = await begun(context, asked, PREFIX, NAMES)
    return await respond(served, reply, reply.generation, as_message)


async def ollama_generate(context: RequestContext, request: OllamaGenerateRequest) -> Response:
    """Answer a question, or continue a `raw` text, as Ollama does."""
    if not request.prompt:
        return await loaded(context, request.model, as_response())
    if request.raw:
        served, _, _ = await completions.begin(context, request.completion(), PREFIX)
        [generation] = served.generations
        return await respond(served, generation, generation, as_response)
    asked = await on_thread(request.chat, context.body.size)
    request.prompt, request.images = "", None
    served, reply = await begun(context, asked, PREFIX, NAMES)
    return await respond(served, reply, reply.generation, as_response)


async def loaded(context: RequestContext, model: str, nothing: Shape) -> Response:
    """Answers a request without a prompt, which asks only to load the model."""
    settings = context.service.settings
    known_model(settings, model)
    await ensure_loaded(context)
    name = model or settings.model_id
    return JSONResponse({"model": name, **moment(), **nothing, "done": True, "done_reason": "load"})


async def respond(
    served: ServedRequest,
    parts: Reply | TextGeneration,
    generation: TextGeneration,
    shape: Callable[..., Shape],
) -> Response:
    writer = OllamaWriter(served, parts, generation, shape)
    return await served.respond([parts], writer, partial(collect, served, parts, writer))


async def collect(served: ServedRequest, parts: Reply | TextGeneration, writer: OllamaWriter) -> bytes:
    text = thinking = ""
    calls: list[Shape] = []
    async for part in parts:
        match writer.take(part):
            case Reasoning(more):
                thinking += more
            case Content(more):
                text += more
            case dict() as call:
                calls.append(call)
    whole = {**writer.envelope(), **writer.shape(text, thinking, calls), **writer.ending()}
    return encode({**whole, **writer.scores()})


class OllamaWriter(EventWriter):
    """An answer in lines of JSON. A complete tool call is one line. A call that is cut off is left out:
    Ollama's arguments are an object, in which nobody sees that some are missing."""

    media_type = "application/x-ndjson"
    pings = False

    def __init__(
        self,
        served: ServedRequest,
        answer: Reply | TextGeneration,
        generation: TextGeneration,
        shape: Callable[..., Shape],
    ) -> None:
        self._served, self._answer, self._generation, self.shape = served, answer, generation, shape
        self._logprobs = ChatLogprobs(served.request, served.vocab, generation)
        self._call: ToolCall | None = None
        self._arguments = ""

    def envelope(self) -> Shape:
        """Fields of every object."""
        return {"model": self._served.model, **moment()}

    def take(self, part: Part | str) -> Reasoning | Content | Shape | None:
        """The part, or the call that it completes; None inside a call."""
        match part:
            case str():
                return Content(part)
            case ToolCall():
                self._call, self._arguments = part, ""
                return None
            case Arguments(_, text):
                self._arguments += text
                return self._whole_call() if part.last else None
        return part

    def _whole_call(self) -> Shape:
        assert self._call is not None
        call, arguments = self._call, from_json(self._arguments)
        return {"id": call.id, "function": {"index": call.index, "name": call.name, "arguments": arguments}}

    def ending(self) -> Shape:
        """The last object's further fields: why the answer ended, and times in nanoseconds. Raises ApiError
        503 if the server cut it short."""
        generation = self._generation
        reason = self._served.check(self._answer.finish_reason)
        timings = generation.request.timings
        times = timings.queue_ms, timings.prefill_ms, timings.decode_ms
        waited, read, wrote = (int(1e6 * milliseconds) for milliseconds in times)
        return {
            "done": True,
            "done_reason": "length" if reason == "length" else "stop",
            "total_duration": waited + read + wrote,
            "load_duration": 0,
            "prompt_eval_count": generation.request.prompt_length,
            "prompt_eval_duration": read,
            "eval_count": generation.completion_tokens,
            "eval_duration": wrote,
        }

    def scores(self) -> Shape:
        """The log-probabilities of new tokens, where they are asked for."""
        found = self._logprobs.new()
        return {} if found is None else {"logprobs": found["content"]}

    def _line(self, shaped: Shape) -> bytes:
        return encode({**self.envelope(), **shaped, "done": False, **self.scores()}) + b"\n"

    async def write(self, index: int, part: Part | str | None) -> bytes:
        match None if part is None else self.take(part):
            case Reasoning(text):
                return self._line(self.shape(thinking=text))
            case Content(text):
                return self._line(self.shape(text))
            case dict() as call:
                return self._line(self.shape(calls=[call]))
        return b""

    async def end(self) -> bytes:
        return encode({**self.envelope(), **self.shape(), **self.ending(), **self.scores()}) + b"\n"

    def failure(self, error: ApiError) -> bytes:
        return encode(error.ollama_body()) + b"\n"


def moment() -> Shape:
    return {"created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}
