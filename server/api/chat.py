"""Chat completions: /v1/chat/completions, and /invocations with messages."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from qwen_serve.server.api.logprobs import ChatLogprobs, prompt_logprobs
from qwen_serve.server.api.request import prepared
from qwen_serve.server.api.serving import ServedRequest, check_count, prompt_budget, stop_strings, truncated
from qwen_serve.server.api.sse import encode, ending, event, merge
from qwen_serve.server.api.structured import WantedGrammar, wanted_grammar
from qwen_serve.server.chat import Arguments, Content, Reasoning, Reply, ReplyParser, ToolCall

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from fastapi import Request, Response

    from qwen_serve.server.api.protocol import ChatRequest
    from qwen_serve.server.api.service import Service
    from qwen_serve.server.chat import Part, ReplyOptions, StopStrings
    from qwen_serve.server.engine import Prompt

KIND = "chat.completion"
CHUNK = "chat.completion.chunk"


async def chat(http: Request, service: Service, request: ChatRequest, size: int) -> Response:
    """Answers with a message; `size` is the body's, in bytes."""
    inline = request.inlines_reasoning(service.settings.inline_reasoning)
    served, replies = await begin(http, service, request, size, "chatcmpl-", inline_reasoning=inline)
    return await served.respond(http, partial(stream, served, replies), partial(collect, served, replies))


async def begin(
    http: Request,
    service: Service,
    request: ChatRequest,
    size: int,
    prefix: str,
    *,
    inline_reasoning: bool = False,
) -> tuple[ServedRequest, list[Reply]]:
    """Submits a conversation, whatever the format that it came in: a reply for each choice.

    `prefix` is that of the response's id.
    """
    engine = service.backend.engine
    check_count(service, request)

    def prepare(
        interrupt: Callable[[], None],
    ) -> tuple[Prompt, bool, StopStrings | None, WantedGrammar | None]:
        format_ = request.wanted_format(engine.vocab.added_tokens)
        budget = prompt_budget(request, engine.context_size, interrupt)
        ids, thinking = prompt_of(service, request, budget)
        prompt = engine.prompt(truncated(ids, request, engine.context_size))
        request.messages = []  # they would stay for as long as the answer takes
        return prompt, thinking, stop_strings(request), wanted_grammar(format_, thinking=thinking)

    prompt, thinking, stops, wanted = await prepared(http, prepare, size)
    limits = (
        request.thinking_limits(service.settings, engine.vocab, request.token_limit) if thinking else None
    )
    constrain = None if wanted is None else await wanted.compiled(http, service)
    parsers = [
        ReplyParser(
            thinking=thinking,
            inline_reasoning=inline_reasoning,
            tools=request.offered_tools,
        )
        for _ in range(request.choices)
    ]
    served = ServedRequest(service, request, [prompt], stops, prefix, constrain, limits)
    one_call = request.parallel_tool_calls is False
    replies = [
        Reply(generation, parser, one_call=one_call, reasoning=request.include_reasoning is not False)
        for generation, parser in zip(served.generations, parsers, strict=True)
    ]
    return served, replies


def prompt_of(service: Service, request: ChatRequest, check: Callable[[int], None]) -> tuple[list[int], bool]:
    """The conversation's token ids, and whether the reply begins with reasoning. `check` is told of ids as
    they come. Raises PromptError, and what `check` raises."""
    prompter = service.backend.prompter
    how: ReplyOptions = {
        "enable_thinking": request.thinks(service.settings.thinking) and prompter.can_think,
        "add_generation_prompt": request.add_generation_prompt is not False,
        "continue_final_message": request.continues,
    }
    ids = prompter.chat(
        request.messages,
        check,
        tools=request.offered_tools,
        template_kwargs=request.chat_template_kwargs,
        **how,
    )
    return ids, prompter.reply_reasons(request.messages, **how)


async def collect(served: ServedRequest, replies: list[Reply]) -> bytes:
    messages = await asyncio.gather(*map(message_of, replies))

    def written() -> bytes:
        choices = [
            {
                "index": index,
                "message": message,
                "logprobs": ChatLogprobs(served.request, served.vocab, reply.generation).all(),
                "finish_reason": served.check(reply.finish_reason),
            }
            for index, (message, reply) in enumerate(zip(messages, replies, strict=True))
        ]
        scores = prompt_logprobs(served.request, served.vocab, replies[0].generation)
        return encode(
            {**served.envelope(KIND, choices), "usage": served.usage(), **scores, **served.extras()}
        )

    return await served.written(written)


async def message_of(reply: Reply) -> dict[str, Any]:
    reasoning, content = "", ""
    calls: list[ToolCall] = []
    arguments: dict[int, str] = {}
    async for part in reply:
        match part:
            case Reasoning(text):
                reasoning += text
            case Content(text):
                content += text
            case ToolCall():
                calls.append(part)
            case Arguments(index, text):
                arguments[index] = arguments.get(index, "") + text
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [tool_call(call, arguments[call.index]) for call in calls]
    return message


async def stream(served: ServedRequest, replies: list[Reply]) -> AsyncGenerator[bytes, None]:
    """The response as events.

    The role comes with a choice's first token and not before, so that clients that time the first chunk
    measure the time to the first token.
    """
    started: set[int] = set()
    logprobs = [ChatLogprobs(served.request, served.vocab, reply.generation) for reply in replies]

    def chunk(
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        told: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        if index not in started:
            started.add(index)
            delta = {"role": "assistant", "content": "", **delta}
        choice = {"index": index, "delta": delta, "logprobs": told, "finish_reason": finish_reason}
        return {**served.envelope(CHUNK, [choice]), **served.of_chunk()}

    left = len(replies)
    async for index, part in merge([aiter(reply) for reply in replies]):
        told = logprobs[index].new()
        if part is None:
            left -= 1
            last = chunk(index, {}, served.check(replies[index].finish_reason), told)
            if left:
                yield event(last)
        else:
            yield event(chunk(index, delta_of(part), told=told))
    total = [{**served.envelope(CHUNK, []), "usage": served.usage()}] if served.include_usage else []
    yield ending({**last, **served.extras()}, *total)


def delta_of(part: Part) -> dict[str, Any]:
    match part:
        case Reasoning(text):
            return {"reasoning_content": text}
        case Content(text):
            return {"content": text}
        case ToolCall():
            return {"tool_calls": [{"index": part.index, **tool_call(part, "")}]}
        case Arguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def tool_call(call: ToolCall, arguments: str) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
