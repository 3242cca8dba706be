"""Text completions: /v1/completions, and /invocations with a prompt."""

from __future__ import annotations

import asyncio
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from server.api.request import off_loop
from server.api.serving import ServedRequest, stop_strings
from server.api.sse import Frame, ending, event, merge

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from fastapi import Request, Response

    from server.api.protocol import CompletionRequest
    from server.api.service import Service
    from server.chat import StopStrings, TextGeneration
    from server.engine import Prompt, Vocab

KIND = "text_completion"


async def complete(http: Request, service: Service, request: CompletionRequest, size: int) -> Response:
    """Answers with a completion; `size` is the body's, in bytes."""
    backend = service.backend

    def prepare() -> tuple[list[Prompt], list[str], StopStrings | None]:
        ids = [backend.prompter.raw(given) if isinstance(given, str) else given for given in request.prompt]
        prompts = list(map(backend.engine.prompt, ids))
        echoes = [""] * len(prompts)
        if request.echo:
            echoes = [
                given if isinstance(given, str) else text_of_ids(backend.engine.vocab, given)
                for given in request.prompt
            ]
        return prompts, echoes, stop_strings(request)

    prompts, echoes, stops = await off_loop(prepare, size)
    served = ServedRequest(service, request, prompts, stops, "cmpl-")
    per_choice = [text for text in echoes for _ in range(request.choices)]
    return await served.respond(
        http, partial(stream, served, per_choice), partial(collect, served, per_choice)
    )


def text_of_ids(vocab: Vocab, ids: Sequence[int]) -> str:
    return b"".join(map(vocab.token_bytes, ids)).decode("utf-8", "replace")


async def collect(served: ServedRequest, echoes: Sequence[str]) -> dict[str, Any]:
    """The whole response object."""
    texts = await asyncio.gather(*map(text_of, served.generations))
    choices = [
        choice(index, start + text, served.check(generation.finish_reason))
        for index, (start, text, generation) in enumerate(zip(echoes, texts, served.generations, strict=True))
    ]
    return {**served.envelope(KIND, choices), "usage": served.usage(), **served.extras()}


async def text_of(generation: TextGeneration) -> str:
    return "".join([text async for text in generation])


async def stream(served: ServedRequest, echoes: Sequence[str]) -> AsyncGenerator[bytes, None]:
    """The response as events: texts, a finish reason for each choice, usage where asked for."""
    usage = {"usage": None} if served.include_usage else {}

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
        last = chunk(index, "", served.check(served.generations[index].finish_reason))
        if left:
            yield event(last)
    total = [{**served.envelope(KIND, []), "usage": served.usage()}] if served.include_usage else []
    yield ending({**last, **served.extras()}, *total)


def choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
