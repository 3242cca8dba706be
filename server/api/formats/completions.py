"""Text completions: /v1/completions, and /invocations with a prompt."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator

from qwen_serve.server.api.errors import bad_request
from qwen_serve.server.api.fields.generation import GenerationRequest
from qwen_serve.server.api.fields.structured import WantedGrammar, wanted_grammar
from qwen_serve.server.api.fields.thinking import BUDGETS
from qwen_serve.server.api.fields.unsupported import UNSUPPORTED
from qwen_serve.server.api.logprobs import ChatLogprobs, CompletionLogprobs, prompt_logprobs
from qwen_serve.server.api.request import prepared
from qwen_serve.server.api.serving import ServedRequest, check_count, prompt_budget, stop_strings, truncated
from qwen_serve.server.api.sse import encode, ending, event, merge
from qwen_serve.server.engine import MAX_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from fastapi import Request, Response

    from qwen_serve.server.api.service import Service
    from qwen_serve.server.chat import StopStrings, TextGeneration
    from qwen_serve.server.engine import Prompt, Vocab

KIND = "text_completion"

MAX_PROMPTS = 2048

PromptInput = str | list[int]


NonEmptyIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
NonEmptyText = Annotated[str, Field(min_length=1)]
AnyPrompt = (
    NonEmptyText
    | NonEmptyIds
    | Annotated[list[NonEmptyText | NonEmptyIds], Field(min_length=1, max_length=MAX_PROMPTS)]
)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


def _prompt_list(value: Any) -> list[PromptInput]:
    """The four forms of `prompt` as one: a list of texts or of token ids."""
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(prompts, list) or not all(isinstance(item, str) or _is_ids(item) for item in prompts):
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")
    if not prompts or not all(prompts):
        raise ValueError("must not be empty")
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS:,} prompts can be sent at once")
    return prompts


class CompletionRequest(GenerationRequest):
    """Text in, text out: no template, no thinking."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **UNSUPPORTED,
        "top_logprobs": (0,),
        "enable_thinking": (False,),
        "thinking": (False, {"type": "disabled"}),
        "reasoning": ({"effort": "none"},),
        "reasoning_effort": ("none",),
        **dict.fromkeys(BUDGETS, (-1, 0)),
        "reasoning_budget_message": ("",),
        "thinking_repetition_penalty": (1,),
    }

    prompt: Annotated[list[PromptInput], BeforeValidator(_prompt_list, json_schema_input_type=AnyPrompt)]
    max_tokens: int | None = Field(None, ge=0)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _nothing_only_with_echo(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise bad_request("max_tokens: must be at least 1, or 0 with echo", "max_tokens", "invalid_value")
        return self

    @property
    def answer_logprobs(self) -> int | None:
        return super().answer_logprobs if self.logprobs is None else self.logprobs

    @property
    def by_n_probs(self) -> bool:
        return super().by_n_probs and self.logprobs is None

    @property
    def scored_prompt(self) -> int | None:
        echoed = self.logprobs if self.echo else None
        wanted = [number for number in (self.prompt_logprobs, echoed) if number is not None]
        return max(wanted, default=None)


async def complete(http: Request, service: Service, request: CompletionRequest, size: int) -> Response:
    """Answers with a completion; `size` is the body's, in bytes."""
    backend = service.backend
    check_count(service, request, len(request.prompt))

    def prepare(
        interrupt: Callable[[], None],
    ) -> tuple[list[Prompt], list[str], StopStrings | None, WantedGrammar | None]:
        def ids_of(given: str | list[int]) -> list[int]:
            budget = prompt_budget(request, backend.engine.context_size, interrupt)
            return backend.prompter.raw(given, budget) if isinstance(given, str) else given

        whole = list(map(ids_of, request.prompt))
        kept = [truncated(ids, request, backend.engine.context_size) for ids in whole]
        prompts = list(map(backend.engine.prompt, kept))
        echoes = [""] * len(prompts)
        if request.echo:
            echoes = [
                given
                if isinstance(given, str) and len(ids) == len(all_ids)
                else text_of_ids(backend.engine.vocab, ids)
                for given, all_ids, ids in zip(request.prompt, whole, kept, strict=True)
            ]
            if sum(map(len, echoes)) * request.choices > (most := service.settings.max_body_mib * 2**20):
                raise bad_request(f"echo: the answer would repeat more than {most:,} characters", "echo")
        request.prompt = []  # they would stay for as long as the answer takes
        wanted = wanted_grammar(request.wanted_format(backend.engine.vocab.added_tokens), thinking=False)
        return prompts, echoes, stop_strings(request), wanted

    prompts, echoes, stops, wanted = await prepared(http, prepare, size)
    constrain = None if wanted is None else await wanted.compiled(http, service)
    served = ServedRequest(service, request, prompts, stops, "cmpl-", constrain)
    starts = [start for start in zip(prompts, echoes, strict=True) for _ in range(request.choices)]
    answers = [
        Answer(
            generation,
            echo,
            ChatLogprobs(request, served.vocab, generation)
            if request.by_n_probs
            else CompletionLogprobs(request, served.vocab, generation, prompt.ids),
        )
        for generation, (prompt, echo) in zip(served.generations, starts, strict=True)
    ]
    return await served.respond(http, partial(stream, served, answers), partial(collect, served, answers))


@dataclass(frozen=True, slots=True)
class Answer:
    generation: TextGeneration
    echo: str
    """What its text begins with."""
    logprobs: CompletionLogprobs | ChatLogprobs


def text_of_ids(vocab: Vocab, ids: Sequence[int]) -> str:
    """Control tokens by their names."""
    return b"".join(map(vocab.spelling, ids)).decode("utf-8", "replace")


async def collect(served: ServedRequest, answers: Sequence[Answer]) -> bytes:
    texts = await asyncio.gather(*(text_of(answer.generation) for answer in answers))

    def written() -> bytes:
        choices = [
            {
                **choice(
                    index,
                    answer.echo + text,
                    served.check(answer.generation.finish_reason),
                    answer.logprobs.all(),
                ),
                **prompt_logprobs(served.request, served.vocab, answer.generation),
            }
            for index, (answer, text) in enumerate(zip(answers, texts, strict=True))
        ]
        return encode({**served.envelope(KIND, choices), "usage": served.usage(), **served.extras()})

    return await served.written(written)


async def text_of(generation: TextGeneration) -> str:
    return "".join([text async for text in generation])


async def stream(served: ServedRequest, answers: Sequence[Answer]) -> AsyncGenerator[bytes, None]:
    """The response as events: texts, a finish reason for each choice, usage where asked for."""

    def chunk(
        index: int, text: str, finish_reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return {
            **served.envelope(KIND, [choice(index, text, finish_reason, logprobs)]),
            **served.of_chunk(),
        }

    def echo_of(index: int, answer: Answer) -> bytes:
        return event(chunk(index, answer.echo, logprobs=answer.logprobs.prompt()))

    scored = answers[0].logprobs.asked
    for index, answer in enumerate(answers):
        if answer.echo and not scored:
            yield event(chunk(index, answer.echo))
    left = len(answers)
    echoed: set[int] = set()
    async for index, text in merge([aiter(generation) for generation in served.generations]):
        answer = answers[index]
        if scored and answer.echo and index not in echoed:  # not before the prompt has been read
            echoed.add(index)
            yield await served.written(partial(echo_of, index, answer))
        if text is not None:
            yield event(chunk(index, text, logprobs=answer.logprobs.new(last=False)))
            continue
        left -= 1
        reason = served.check(answer.generation.finish_reason)
        last = chunk(index, "", reason, answer.logprobs.new(last=True))
        if left:
            yield event(last)
    total = [{**served.envelope(KIND, []), "usage": served.usage()}] if served.include_usage else []
    yield ending({**last, **served.extras()}, *total)


def choice(
    index: int, text: str, finish_reason: str | None, logprobs: dict[str, Any] | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
