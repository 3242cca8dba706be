"""The generations of one request: submitted together, counted together, cancelled together."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from fastapi.responses import JSONResponse

from server.api.errors import ApiError
from server.api.request import until_gone
from server.api.sampling import sampling_params
from server.api.sse import OPENAI, Dialect, EventStream
from server.chat import StopStrings, TextGeneration, generate

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

    from fastapi import Request, Response

    from server.api.protocol import GenerationRequest
    from server.api.service import Service
    from server.engine import Prompt


class ServedRequest:
    """One request's answers in the making: `n` for each prompt, prompt by prompt.

    Submits at once; raises what `Engine.submit` raises, with nothing left running. All choices of a prompt
    share it, and all of them share `stops`.
    """

    def __init__(
        self,
        service: Service,
        request: GenerationRequest,
        prompts: Sequence[Prompt],
        stops: StopStrings | None,
        prefix: str,
    ) -> None:
        backend = service.backend
        self.id = f"{prefix}{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = request.model or service.settings.model_id
        self.include_usage = request.include_usage
        self._stream = bool(request.stream)
        self._metrics = service.metrics
        self._per_prompt = request.choices
        self.generations: list[TextGeneration] = []
        try:
            for prompt in prompts:
                for choice in range(request.choices):
                    params = sampling_params(request, backend.defaults, choice=choice)
                    self.generations.append(
                        generate(
                            backend.engine,
                            prompt,
                            params,
                            request.token_limit,
                            stops=stops,
                            stream=not request.whole,
                        )
                    )
        except BaseException:
            self.close()
            raise

    async def respond(
        self,
        http: Request,
        stream: Callable[[], AsyncGenerator[bytes, None]],
        collect: Callable[[], Awaitable[Mapping[str, Any]]],
        dialect: Dialect = OPENAI,
    ) -> Response:
        """The response: events where the request asks for a stream, else one object.

        Nothing is generated any longer than the client waits for it, however the response ends.
        """
        if self._stream:
            return EventStream(stream(), self.close, dialect)
        try:
            return JSONResponse(await until_gone(http, collect()))
        finally:
            self.close()

    def close(self) -> None:
        """Cancels what still runs and reports to the metrics. To be called once, however the request ends."""
        for generation in self.generations:
            generation.cancel()
            self._metrics.observe(generation)

    def check(self, finish_reason: str | None) -> str:
        """Why an answer ended, in OpenAI's words. Raises ApiError 503 where the server cut it short."""
        if finish_reason in ("stop", "length", "tool_calls"):
            return finish_reason
        raise ApiError(503, "the server stopped before the answer was complete", code="draining")

    def usage(self) -> dict[str, Any]:
        """Tokens of the whole request; a prompt with several answers counts once.

        `speculation`, an extension: what became of tokens guessed ahead, where there were any.
        """
        prompts = self.generations[:: self._per_prompt]
        prompt_tokens = sum(generation.prompt_tokens for generation in prompts)
        completion_tokens = sum(generation.completion_tokens for generation in self.generations)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(generation.cached_tokens for generation in prompts)
            },
        }
        drafts = [generation.generation.drafts for generation in self.generations]
        if steps := sum(counts.steps for counts in drafts):
            accepted = sum(counts.accepted for counts in drafts)
            usage["speculation"] = {
                "steps": steps,
                "drafted": sum(counts.drafted for counts in drafts),
                "accepted": accepted,
                "mean_accepted_length": round(accepted / steps, 3),
            }
        return usage

    def extras(self) -> dict[str, Any]:
        """llama-server's `timings` extension, for requests with a single answer."""
        if len(self.generations) != 1:
            return {}
        [generation] = self.generations
        timings = generation.generation.timings
        prompt_n = generation.prompt_tokens - generation.cached_tokens
        # the first token falls out of the prefill
        predicted_n = max(0, generation.completion_tokens - 1)
        figures = {
            "cache_n": generation.cached_tokens,
            "queue_ms": timings.queue_ms,
            "prompt_n": prompt_n,
            "prompt_ms": timings.prefill_ms,
            "prompt_per_second": _rate(prompt_n, timings.prefill_ms),
            "predicted_n": generation.completion_tokens,
            "predicted_ms": timings.decode_ms,
            "predicted_per_second": _rate(predicted_n, timings.decode_ms),
        }
        return {"timings": figures}

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The fields that every response and every chunk has."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def stop_strings(request: GenerationRequest) -> StopStrings | None:
    """What ends the answers early, for all of them; work for as long as the strings are."""
    return StopStrings(request.stop) if request.stop else None


def _rate(count: int, milliseconds: float) -> float:
    return count / milliseconds * 1000 if milliseconds > 0 else 0.0
