"""Text completions: /v1/completions, and /invocations with a prompt."""

from __future__ import annotations

import asyncio
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from fastapi.responses import JSONResponse

from server.api.body import off_loop
from server.api.run import Run
from server.api.sse import EventStream, Frame, ending, event
from server.api.streams import merge, until_gone

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from fastapi import Request, Response

    from server.api.schemas import CompletionRequest
    from server.api.service import Service
    from server.chat import Prompter, TextGeneration
    from server.engine import Vocab

KIND = "text_completion"


async def complete(http: Request, service: Service, request: CompletionRequest, size: int) -> Response:
    """Answers with a completion; `size` is the body's, in bytes."""
    backend = service.backend
    prompts = await off_loop(lambda: tokenize(backend.prompter, request), size)
    echoes = [echo(backend.engine.vocab, request, number, ids) for number, ids in enumerate(prompts)]
    run = Run(service, request, prompts, "cmpl")
    per_choice = [text for text in echoes for _ in range(request.choices)]
    if request.stream:
        return EventStream(stream(run, per_choice, request.include_usage), run.close)
    try:
        return JSONResponse(await until_gone(http, collect(run, per_choice)))
    finally:
        run.close()


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


async def collect(run: Run, echoes: Sequence[str]) -> dict[str, Any]:
    """The whole response object."""
    texts = await asyncio.gather(*map(text_of, run.generations))
    choices = [
        choice(index, start + text, run.check(generation))
        for index, (start, text, generation) in enumerate(zip(echoes, texts, run.generations, strict=True))
    ]
    return {**run.envelope(KIND, choices), "usage": run.usage(), **run.extras()}


async def text_of(generation: TextGeneration) -> str:
    return "".join([text async for text in generation])


async def stream(run: Run, echoes: Sequence[str], include_usage: bool) -> AsyncGenerator[bytes, None]:
    """The response as events: texts, a finish reason for each choice, usage where asked for."""
    usage = {"usage": None} if include_usage else {}

    def chunk(index: int, text: str, finish_reason: str | None = None) -> dict[str, Any]:
        return {**run.envelope(KIND, [choice(index, text, finish_reason)]), **usage}

    @cache
    def frame(index: int) -> Frame:
        return Frame(partial(chunk, index))

    for index, start in enumerate(echoes):
        if start:
            yield frame(index).filled(start)
    left = len(echoes)
    async for index, text in merge([aiter(generation) for generation in run.generations]):
        if text is not None:
            yield frame(index).filled(text)
            continue
        left -= 1
        last = chunk(index, "", run.check(run.generations[index]))
        if left:
            yield event(last)
    total = [{**run.envelope(KIND, []), "usage": run.usage()}] if include_usage else []
    yield ending({**last, **run.extras()}, *total)


def choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
