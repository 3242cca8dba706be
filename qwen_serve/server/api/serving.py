"""The generations of one request, which are submitted, counted and cancelled together."""

import asyncio
import sys
import time
import uuid
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import Response

from qwen_serve.server.api.context import RequestContext
from qwen_serve.server.api.errors import ApiError, bad_request
from qwen_serve.server.api.fields.generation import GenerationRequest
from qwen_serve.server.api.fields.sampling import of_choice
from qwen_serve.server.api.fields.structured import WantedGrammar
from qwen_serve.server.api.limits import in_thread, stopped
from qwen_serve.server.api.observe.record import Answers
from qwen_serve.server.api.request import until_gone
from qwen_serve.server.api.service import Service
from qwen_serve.server.api.sse import EventStream, EventWriter
from qwen_serve.server.api.tenant import Placement
from qwen_serve.server.chat import StopStrings, TextGeneration
from qwen_serve.server.engine import (
    Constraint,
    EngineSettings,
    GenerateRequest,
    InvalidGrammar,
    Prompt,
    SamplingParams,
    ThinkingLimits,
    TokenBudget,
)


class ServedRequest:
    """One request's running answers: `n` for each prompt, in the order of the prompts.

    The constructor submits them. If `Engine.submit` raises, it ends those already running and raises the
    same. All answers to a prompt share it, and all answers share `stops` and the limits of `thinking`.
    `constrain` returns each answer's constraint. `tags` are the tokens marked in their text.
    """

    def __init__(
        self,
        context: RequestContext,
        request: GenerationRequest,
        placement: Placement,
        prompts: Sequence[Prompt],
        stops: StopStrings | None,
        prefix: str,
        constrain: Callable[[], Constraint] | None = None,
        thinking: ThinkingLimits | None = None,
        tags: Mapping[int, str] | None = None,
    ) -> None:
        self._context = context
        service = context.service
        backend = service.loaded or service.backend  # a draining backend finishes running requests
        self.request = request
        self.vocab = backend.engine.vocab
        self.created = int(time.time())
        self.include_usage = request.include_usage
        self._scored = request.answer_logprobs is not None or request.scored_prompt is not None
        self.params = params = sampling_of(service, request)
        self.service_tier = placement.scheduling.service_tier
        """The tier in effect."""
        self.generations: list[TextGeneration] = []
        self.id = f"{prefix}{request.request_id or uuid.uuid4().hex}"
        self.model = request.model or service.settings.model_id
        self._answers = Answers(self.id, self.model, self.generations, request.choices)
        try:
            for prompt in prompts:
                for choice in range(request.choices):
                    generation = backend.engine.submit(
                        GenerateRequest(
                            prompt,
                            of_choice(params, choice),
                            request.token_limit,
                            stream=not request.whole,
                            salt=placement.salt,
                            constraint=constrain() if constrain else None,
                            thinking=thinking,
                            scheduling=placement.scheduling,
                            adapters=placement.adapters,
                            reports_progress=bool(request.stream and request.reports_progress),
                        )
                    )
                    spell_control = request.skip_special_tokens is False
                    self.generations.append(
                        TextGeneration(generation, self.vocab, stops, spell_control=spell_control, tags=tags)
                    )
        except BaseException:
            self.close()
            raise
        service.open.update(self.generations)
        context.record.answers = self._answers

    async def respond(
        self,
        answers: Sequence[AsyncIterable[Any]],
        writer: EventWriter,
        collect: Callable[[], Awaitable[bytes]],
    ) -> Response:
        """The response: events if the request asks for a stream, else one JSON object.

        Generation stops when the response ends, however it ends.
        """
        if self.request.stream:
            return EventStream([aiter(answer) for answer in answers], writer, self.close)

        async def whole() -> Response:
            return Response(await collect(), media_type="application/json")

        try:
            return await until_gone(self._context.http, whole())
        finally:
            self.close()

    async def written(self, work: Callable[[], bytes]) -> bytes:
        """Runs `work()`, which encodes a whole answer. With log-probabilities, dozens of objects a token, it
        runs on a thread."""
        return await in_thread(work, 0) if self._scored else work()

    def close(self, error: ApiError | None = None) -> None:
        """Cancels the answers that still run, and reports to the metrics. Call this once, however the request
        ends."""
        service = self._context.service
        service.open.difference_update(self.generations)
        self._context.record.error = error or self._context.record.error
        for generation in self.generations:
            generation.cancel()
            service.metrics.observe(generation)

    def check(self, finish_reason: str | None) -> str:
        """An answer's finish reason in OpenAI's words. Raises ApiError 503 if the server ended it early."""
        if finish_reason in ("stop", "length", "tool_calls"):
            return finish_reason
        raise stopped()

    def usage(self) -> dict[str, Any]:
        """Token usage of the whole request; a prompt with several answers counts once.

        `completion_tokens_details` is present if an answer thinks. `speculation`, an extension, counts
        drafted and accepted tokens, if there are any. `cache_miss`, on request, says why the prompt's other
        tokens did not come from the cache.
        """
        answers = self._answers
        usage: dict[str, Any] = {
            "prompt_tokens": answers.prompt_tokens,
            "completion_tokens": answers.completion_tokens,
            "total_tokens": answers.prompt_tokens + answers.completion_tokens,
            "prompt_tokens_details": prompt_details(answers.cached_tokens, answers.image_tokens),
        }
        thoughts = [generation.reasoning_tokens for generation in self.generations]
        if reasoning := [count for count in thoughts if count is not None]:
            usage["completion_tokens_details"] = {"reasoning_tokens": sum(reasoning)}
        if self.request.cache_report:
            usage["prompt_tokens_details"]["cache_miss"] = _misses(answers.prompts)
        drafts = [generation.request.drafts for generation in self.generations]
        if steps := sum(counts.steps for counts in drafts):
            accepted = sum(counts.accepted for counts in drafts)
            usage["speculation"] = {
                "steps": steps,
                "drafted": sum(counts.drafted for counts in drafts),
                "accepted": accepted,
                "mean_accepted_length": round(accepted / steps, 3),
            }
        return usage

    def of_chunk(self) -> dict[str, Any]:
        """The fields of every chunk that the request asks for: usage (so far, or null before the last chunk),
        and llama-server's timings so far."""
        fields = self.extras() if self.request.timings_per_token else {}
        if self.include_usage:
            fields["usage"] = self.usage() if self.request.continuous_usage else None
        return fields

    def extras(self) -> dict[str, Any]:
        """llama-server's `timings` extension, for requests with a single answer."""
        if len(self.generations) != 1:
            return {}
        return {"timings": timings_of(self.generations[0])}

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The fields that every response and every chunk has."""
        asked = self.request.service_tier is not None
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **({"service_tier": self.service_tier} if asked else {}),
        }


def sampling_of(service: Service, request: GenerationRequest) -> SamplingParams:
    """Sampling parameters of the first answer. Raises ApiError 400."""
    backend = service.loaded or service.backend
    mode = request.mode(thinking=service.settings.thinking, can_think=backend.prompter.can_think)
    return request.sampling_params(
        backend.defaults.of(mode),
        backend.engine.vocab,
        logprobs=request.answer_logprobs,
        prompt_logprobs=request.scored_prompt,
    )


def progress_of(generation: TextGeneration, *, read: bool) -> dict[str, Any]:
    """llama-server's `prompt_progress`; `read` is true for a prompt that is complete."""
    request = generation.request
    return {
        "total": request.prompt_length,
        "cache": request.cached_tokens,
        "processed": request.prompt_length if read else request.processed,
        "time_ms": int(1000 * (time.perf_counter() - request.timings.started)),
    }


def timings_of(generation: TextGeneration) -> dict[str, Any]:
    """llama-server's `timings`, with the time waited."""
    timings, drafts = generation.request.timings, generation.request.drafts
    prompt_n = generation.request.prompt_length - generation.request.cached_tokens
    # the first token comes from prefill
    predicted_n = max(0, generation.completion_tokens - 1)
    figures = {
        "cache_n": generation.request.cached_tokens,
        "queue_ms": timings.queue_ms,
        "prompt_n": prompt_n,
        "prompt_ms": timings.prefill_ms,
        "prompt_per_token_ms": timings.prefill_ms / max(1, prompt_n),
        "prompt_per_second": _rate(prompt_n, timings.prefill_ms),
        "predicted_n": generation.completion_tokens,
        "predicted_ms": timings.decode_ms,
        "predicted_per_token_ms": timings.decode_ms / max(1, predicted_n),
        "predicted_per_second": _rate(predicted_n, timings.decode_ms),
    }
    if drafts.drafted:
        figures |= {"draft_n": drafts.drafted, "draft_n_accepted": drafts.accepted}
    return figures


async def compiled(
    context: RequestContext, request: GenerationRequest, wanted: WantedGrammar | None
) -> Callable[[], Constraint] | None:
    """Returns a function that creates each answer's constraint. Builds what samplers need that is slow to
    build. Raises ApiError 400 naming the field, QueueFull if too many grammars wait, and ClientLeft."""
    if request.dry_multiplier:
        dries, params = context.service.backend.engine.dries, sampling_of(context.service, request)
        await until_gone(context.http, in_thread(partial(dries.of, params), 0))
    if wanted is None:
        return None
    while True:
        compiling = context.service.backend.engine.grammars.compile(wanted.text)
        try:
            grammar = await until_gone(context.http, asyncio.wrap_future(compiling))
        except InvalidGrammar as error:
            looser = wanted.loosened(str(error))
            if looser is None:
                raise bad_request(wanted.param, f"cannot be enforced: {error}") from error
            wanted = looser
        else:
            return partial(grammar.begin, wanted.param)


def check_count(settings: EngineSettings, request: GenerationRequest, prompts: int = 1) -> None:
    """Raises ApiError 400 for more answers than the slots and the queue hold together."""
    wanted, most = prompts * request.choices, settings.parallel + settings.max_queue
    if wanted > most:
        raise bad_request(
            "n",
            f"{wanted} answers are asked for, n for each prompt; at most {most} can wait and run together",
        )


def stop_strings(request: GenerationRequest) -> StopStrings | None:
    """The stop strings of all answers. The time to build them is proportional to their length."""
    if not request.stop:
        return None
    included, least = bool(request.include_stop_str_in_output), request.min_tokens or 0
    return StopStrings(request.stop, included=included, min_tokens=least)


def prompt_budget(
    request: GenerationRequest, context_size: int, interrupt: Callable[[], None]
) -> TokenBudget:
    """The limit for tokenizing a prompt: the context's size, unless the request truncates the prompt."""
    return TokenBudget(context_size if request.truncate_prompt_tokens is None else sys.maxsize, interrupt)


def truncated(ids: list[int], request: GenerationRequest, context_size: int) -> list[int]:
    """The end of a prompt, cut to `truncate_prompt_tokens`; -1 cuts to what the context holds beside the
    answer."""
    keep = request.truncate_prompt_tokens
    if keep == -1:
        keep = max(1, context_size - (request.token_limit or 1))
    return ids if keep is None else ids[-keep:]


def prompt_details(cached_tokens: int, image_tokens: int) -> dict[str, Any]:
    """How many of a prompt's tokens were cached and how many are of images; vLLM omits these at zero."""
    images = {"image_tokens": image_tokens} if image_tokens else {}
    return {"cached_tokens": cached_tokens, **images}


def _misses(prompts: Sequence[TextGeneration]) -> Any:
    """Why the prefix cache did not cover the prompt, and up to which token it did; a list for several
    prompts."""
    misses = [
        {"reason": miss.reason, "position": miss.position} if miss else None
        for miss in (generation.request.missed for generation in prompts)
    ]
    return misses if len(misses) > 1 else misses[0]


def _rate(count: int, milliseconds: float) -> float:
    return count / milliseconds * 1000 if milliseconds > 0 else 0.0
