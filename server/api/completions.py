"""Text completions: /v1/completions, and /invocations with a prompt."""

from __future__ import annotations

import asyncio
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from fastapi.responses import JSONResponse

from server.api.request import off_loop, until_gone
from server.api.serving import ServedRequest
from server.api.sse import EventStream, Frame, ending, event, merge

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from fastapi import Request, Response

    from server.api.protocol import CompletionRequest
    from server.api.service import Service
    from server.chat import Prompter, TextGeneration
    from server.engine import Vocab

KIND = "text_completion"


async def complete(http: Request, service: Service, request: CompletionRequest, size: int) -> Response:
    """Answers with a completion; `size` is the body's, in bytes."""
    backend = service.backend
    prompts = await off_loop(lambda: tokenize(backend.prompter, request), size)
    echoes = [echo(backend.engine.vocab, request, number, ids) for number, ids in enumerate(prompts)]
    served = ServedRequest(service, request, prompts, "cmpl")
    per_choice = [text for text in echoes for _ in range(request.choices)]
    if request.stream:
        return EventStream(stream(served, per_choice, request.include_usage), served.close)
    try:
        return JSONResponse(await until_gone(http, collect(served, per_choice)))
    finally:
        served.close()


def tokenize(prompter: Prompter, request: CompletionRequest) -> list[Sequence[int]]:
    return [prompter.raw(prompt) if isinstance(prompt, str) else prompt for prompt in request.prompt]


def echo(vocab: Vocab, request: CompletionRequest, number: int, ids: Sequence[int]) -> str:
    """What comes back before the answer to prompt `number`: the prompt itself where `echo` asks for it."""
    if not request.echo:
        return ""
    prompt = request.prompt[number]
    if isinstance(prompt, str):
        return prompt
    return b"".join(map(vocab.token_bytes, ids)).decode("utf-8", "replace")


async def collect(served: ServedRequest, echoes: Sequence[str]) -> dict[str, Any]:
    """The whole response object."""
    texts = await asyncio.gather(*map(text_of, served.generations))
    choices = [
        choice(index, start + text, served.check(generation))
        for index, (start, text, generation) in enumerate(zip(echoes, texts, served.generations, strict=True))
    ]
    return {**served.envelope(KIND, choices), "usage": served.usage(), **served.extras()}


async def text_of(generation: TextGeneration) -> str:
    return "".join([text async for text in generation])


async def stream(
    served: ServedRequest, echoes: Sequence[str], include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The response as events: texts, a finish reason for each choice, usage where asked for."""
    usage = {"usage": None} if include_usage else {}

    def chunk(index: int, text: str, finish_reason: str | None = None) -> dict[str, Any]:
        return {**served.envelope(KIND, [choice(index, text, finish_reason)]), **usage}

    @cache
    def frame(index: int) -> Frame:
        return Frame(partial(chunk, index))

    for index, start in enumerate(echoes):
        if start:
            yield frame(index).filled(start)
    left = len(echoes)
    async for index, text in merge([aiter(generation) for generation in served.generations]):
        if text is not None:
            yield frame(index).filled(text)
            continue
        left -= 1
        last = chunk(index, "", served.check(served.generations[index]))
        if left:
            yield event(last)
    total = [{**served.envelope(KIND, []), "usage": served.usage()}] if include_usage else []
    yield ending({**last, **served.extras()}, *total)


def choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
