"""llama-server's own completions: /completion, and /completions."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from fastapi import Response
from pydantic import Field

from qwen_serve.server.api.context import RequestContext
from qwen_serve.server.api.fields.sampling import llama_settings, of_choice
from qwen_serve.server.api.formats.completions import CompletionRequest, begin, text_of_ids
from qwen_serve.server.api.limits import in_thread
from qwen_serve.server.api.logprobs import TokenNames
from qwen_serve.server.api.serving import ServedRequest, progress_of, timings_of
from qwen_serve.server.api.sse import EventWriter, Written, encode, event
from qwen_serve.server.chat import TextGeneration
from qwen_serve.server.engine import LLAMA_CPP_SAMPLERS, Prompt, SamplingParams, Vocab

LAST_N = 64
"""llama-server's default window of the penalties, in tokens."""

MAX_FIELDS = 1024


class LlamaCompletionRequest(CompletionRequest):
    """Text in, text out: no template, no thinking, and samplers in llama.cpp's order. Without a limit the
    text ends where the model ends it, or with the context."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **{
            name: values
            for name, values in CompletionRequest.unsupported.items()
            if name not in ("return_tokens", "response_fields", "n_cmpl")
        },
        "echo": (False,),
        "prompt_logprobs": (),
    }

    n_cmpl: int | None = Field(None, ge=1, le=128)
    return_tokens: bool | None = None
    response_fields: list[str] | None = Field(None, fail_fast=True, max_length=MAX_FIELDS)

    @property
    def choices(self) -> int:
        return self.n_cmpl or super().choices

    @property
    def answer_logprobs(self) -> int | None:
        return self.n_probs or self.logprobs or None

    def sampling_params(self, defaults: SamplingParams, vocab: Vocab, **asked: Any) -> SamplingParams:
        """As for other requests, with llama.cpp's order and its penalty window."""
        last_n = LAST_N if defaults.repeat_last_n is None else defaults.repeat_last_n
        defaults = replace(defaults, samplers=LLAMA_CPP_SAMPLERS, repeat_last_n=last_n)
        return super().sampling_params(defaults, vocab, **asked)


async def llama_complete(context: RequestContext, request: LlamaCompletionRequest) -> Response:
    """Continue a prompt, as llama-server does at this path: an object for each answer, or events."""
    served, prompts, _ = await begin(context, request, "cmpl-")
    answers = [
        LlamaAnswer(served, request, generation, index, prompts[index // request.choices])
        for index, generation in enumerate(served.generations)
    ]
    writer = LlamaCompletionWriter(served, answers)
    return await served.respond(served.generations, writer, partial(collect, answers))


async def collect(answers: list[LlamaAnswer]) -> bytes:
    texts = await asyncio.gather(*(answer.generation.text() for answer in answers))

    def written() -> bytes:
        found = [answer.final(text) for answer, text in zip(answers, texts, strict=True)]
        return encode(found[0] if len(found) == 1 else found)

    return await in_thread(written, 0)


class LlamaAnswer:
    """One answer under construction."""

    def __init__(
        self,
        served: ServedRequest,
        request: LlamaCompletionRequest,
        generation: TextGeneration,
        index: int,
        prompt: Prompt,
    ) -> None:
        self._served, self._request = served, request
        self.generation = generation
        self._index, self._prompt = index, prompt
        self._names = TokenNames(served.vocab)
        self._new_line = False
        self._given = 0
        """Tokens already sent."""
        self._read = not generation.request.reports_progress
        """Whether the prompt's progress is reported to its end."""

    def partial(self, text: str) -> list[dict[str, Any]]:
        """The objects for more text; the prompt's progress if `text` is empty."""
        self._new_line = self._new_line or "\n" in text
        found: list[dict[str, Any]] = []
        if not self._read:
            self._read = bool(text)
            found.append(
                {**self._so_far(""), "prompt_progress": progress_of(self.generation, read=self._read)}
            )
        if text:
            found.append({**self._so_far(text), **self._probabilities()})
        return found

    def final(self, text: str) -> dict[str, Any]:
        """The object of the complete answer; for a stream, its last one. Raises ApiError 503 if the server
        cut the answer short."""
        generation, request = self.generation, self._request
        reason = self._served.check(generation.finish_reason)
        stopped_by = generation.stop_string
        params = of_choice(self._served.params, self._index % request.choices)
        limit = -1 if request.token_limit is None else request.token_limit
        whole = {
            **self._so_far(text),
            "tokens": [] if request.stream or not request.return_tokens else self._new_tokens(),
            "stop": True,
            "model": self._served.model,
            "generation_settings": {
                **llama_settings(params),
                "n_predict": limit,
                "max_tokens": limit,
                "stop": request.stop,
                "stream": bool(request.stream),
                "n_probs": request.answer_logprobs or 0,
                "logit_bias": [{"token": token, "bias": bias} for token, bias in params.logit_bias],
            },
            "prompt": text_of_ids(self._served.vocab, [token for token in self._prompt.ids if token >= 0]),
            "has_new_line": self._new_line or "\n" in text,
            "truncated": False,
            "stop_type": "word" if stopped_by else "eos" if reason == "stop" else "limit",
            "stopping_word": stopped_by or "",
            "tokens_cached": generation.request.prompt_length + generation.completion_tokens,
            "timings": timings_of(generation),
            **({} if request.stream else self._probabilities()),
        }
        return nested(whole, request.response_fields) if request.response_fields else whole

    def _so_far(self, text: str) -> dict[str, Any]:
        timed = {"timings": timings_of(self.generation)} if self._request.timings_per_token else {}
        return {
            "index": self._index,
            "content": text,
            "tokens": self._new_tokens() if text and self._request.stream else [],
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": self.generation.completion_tokens,
            "tokens_evaluated": self.generation.request.prompt_length,
            **timed,
        }

    def _new_tokens(self) -> list[int]:
        start, self._given = self._given, self.generation.certain_tokens
        prompt = self.generation.request.prompt_length
        return self.generation.request.tokens[prompt + start : prompt + self._given]

    def _probabilities(self) -> dict[str, Any]:
        n_top = self._request.answer_logprobs
        if n_top is None:
            return {}
        write = partial(self._names.scored, n_top=n_top, with_id=True)
        return {"completion_probabilities": Written(write, self.generation.new_logprobs())}


class LlamaCompletionWriter(EventWriter):
    """The answers as events. Each answer's last event has `"stop": true`; the stream has no end mark."""

    def __init__(self, served: ServedRequest, answers: list[LlamaAnswer]) -> None:
        self._served, self._answers = served, answers

    async def write(self, index: int, part: str | None) -> bytes:
        answer = self._answers[index]
        if part is None:
            return await in_thread(lambda: event(answer.final("")), 0)
        return b"".join(map(event, answer.partial(part)))

    async def end(self) -> bytes:
        return b""


def nested(whole: dict[str, Any], paths: list[str]) -> dict[str, Any]:
    """The values at paths like `timings/prompt_n`, each under its path; missing ones are left out."""
    found: dict[str, Any] = {}
    for path in paths:
        value: Any = whole
        for name in path.split("/"):
            if not isinstance(value, dict) or name not in value:
                break
            value = value[name]
        else:
            found[path] = value
    return found
