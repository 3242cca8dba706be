"""The generations of one request: submitted together, counted together, cancelled together."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from server.api.errors import ApiError
from server.api.sampling import sampling_params
from server.chat import TextGeneration, generate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.api.protocol import GenerationRequest
    from server.api.service import Service


class ServedRequest:
    """One request's answers in the making: `n` for each prompt, prompt by prompt.

    Submits at once; raises what `Engine.submit` raises, with nothing left running.
    """

    def __init__(
        self, service: Service, request: GenerationRequest, prompts: Sequence[Sequence[int]], kind: str
    ) -> None:
        backend = service.backend
        self.id = f"{kind}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = request.model or service.settings.model_id
        self._metrics = service.metrics
        self._per_prompt = request.choices
        self.generations: list[TextGeneration] = []
        try:
            for prompt in prompts:
                for choice in range(request.choices):
                    params = sampling_params(request, backend.defaults, choice=choice)
                    made = generate(backend.engine, prompt, params, request.token_limit, request.stop)
                    made.generation.patient = request.whole
                    self.generations.append(made)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancels what still runs and reports to the metrics. To be called once, however the request ends."""
        for generation in self.generations:
            generation.cancel()
            self._metrics.observe(generation)

    def check(self, generation: TextGeneration) -> str:
        """Why a generation ended, in OpenAI's words. Raises ApiError 503 where the server cut it short."""
        if generation.finish_reason in ("stop", "length"):
            return generation.finish_reason
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


def _rate(count: int, milliseconds: float) -> float:
    return count / milliseconds * 1000 if milliseconds > 0 else 0.0
