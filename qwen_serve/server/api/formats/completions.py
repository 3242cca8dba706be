"""Text completions: /v1/completions, and /invocations with a prompt."""

import asyncio
import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Self

from fastapi import Response
from pydantic import BeforeValidator, Field, model_validator

from qwen_serve.server.api.context import RequestContext
from qwen_serve.server.api.errors import bad_request
from qwen_serve.server.api.fields.generation import GenerationRequest
from qwen_serve.server.api.fields.structured import WantedGrammar, wanted_grammar
from qwen_serve.server.api.fields.thinking import BUDGETS
from qwen_serve.server.api.fields.unsupported import UNSUPPORTED
from qwen_serve.server.api.formats.chunks import ChunkWriter
from qwen_serve.server.api.logprobs import LOWEST, SOON, ChatLogprobs, TokenNames, in_list, prompt_logprobs
from qwen_serve.server.api.request import ensure_loaded, prepared
from qwen_serve.server.api.serving import (
    ServedRequest,
    check_count,
    compiled,
    prompt_budget,
    stop_strings,
    truncated,
)
from qwen_serve.server.api.sse import Written, encode, event
from qwen_serve.server.api.tenant import placement_of
from qwen_serve.server.chat import StopStrings, TextGeneration
from qwen_serve.server.engine import MAX_LOGPROBS, Prompt, TokenLogprobs, Vocab

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
        "messages": ([],),
        "top_logprobs": (0,),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "chat_template_kwargs": ({}, {"enable_thinking": False}),
        "enable_thinking": (False,),
        "thinking": (False, {"type": "disabled"}),
        "reasoning": ({"effort": "none"},),
        "reasoning_effort": ("none",),
        **dict.fromkeys(BUDGETS, (-1, 0)),
        "reasoning_budget_message": ("",),
        "thinking_repetition_penalty": (1,),
    }

    prompt: Annotated[list[PromptInput], BeforeValidator(_prompt_list, json_schema_input_type=AnyPrompt)]
    max_tokens: int | None = Field(None, ge=-1)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _nothing_only_with_echo(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise bad_request("max_tokens", "must be at least 1, or 0 with echo")
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


async def complete(context: RequestContext, request: CompletionRequest) -> Response:
    """Continue a prompt: no template, no thinking."""
    served, prompts, echoes = await begin(context, request, "cmpl-")
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
    writer = CompletionWriter(served, answers)
    return await served.respond(served.generations, writer, partial(collect, served, answers))


async def begin(
    context: RequestContext, request: CompletionRequest, prefix: str
) -> tuple[ServedRequest, list[Prompt], list[str]]:
    """Submits prompts in any format. Returns them as tokens, with the text that each answer begins with.
    `prefix` starts the response's id."""
    placement = placement_of(context, request)
    backend = await ensure_loaded(context, lambda: wanted_grammar(request.wanted_format(()), thinking=False))
    check_count(backend.engine.settings, request, len(request.prompt))

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
            most = context.service.settings.max_body_mib * 2**20
            if sum(map(len, echoes)) * request.choices > most:
                raise bad_request("echo", f"the answer would repeat more than {most:,} characters")
        request.prompt = []  # frees the prompts for the time of the answer
        wanted = wanted_grammar(request.wanted_format(backend.engine.vocab.added_tokens), thinking=False)
        return prompts, echoes, stop_strings(request), wanted

    prompts, echoes, stops, wanted = await prepared(context, prepare)
    constrain = await compiled(context, request, wanted)
    return ServedRequest(context, request, placement, prompts, stops, prefix, constrain), prompts, echoes


class CompletionLogprobs:
    """The log-probabilities of one choice of a text completion: parallel lists, an entry for each token.

    If the text is echoed, the prompt's tokens come first, and the first of them is null. If a token ended the
    text, it is the last, so that a client that asks for one token gets one (lm-eval drops it again).
    """

    def __init__(
        self, request: CompletionRequest, vocab: Vocab, generation: TextGeneration, prompt: Sequence[int]
    ) -> None:
        self._names = TokenNames(vocab, as_ids=bool(request.return_tokens_as_token_ids))
        self._n_top = request.logprobs
        self._generation = generation
        self._prompt = prompt if request.echo else ()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0
        """Offset of the next token in the text, in characters."""
        self._all: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }

    @property
    def asked(self) -> bool:
        """Whether the request asks for log-probabilities."""
        return self._n_top is not None

    def advance(self) -> None:
        """Write those of the tokens so far, for `all`, if that is done soon."""
        if self.asked and self._generation.unscored <= SOON and not self._prompt:
            self._add(self._of_answer(last=False))

    def all(self) -> dict[str, Any] | None:
        """The log-probabilities of the whole choice, which is complete."""
        if not self.asked:
            return None
        self._add([*self._of_prompt(), *self._of_answer(last=True)])
        tops = Written(in_list, self._all["top_logprobs"])
        return {**self._all, "top_logprobs": tops} if self._all["tokens"] else None

    def _add(self, found: list[tuple[int, TokenLogprobs | None]]) -> None:
        if (more := self._written(found)) is not None:
            tops = more["top_logprobs"]
            more["top_logprobs"] = [tops.write(tops.items)[1:-1]]
            for field, values in more.items():
                self._all[field] += values

    def prompt(self) -> dict[str, Any] | None:
        """Log-probabilities of the echoed prompt, which has been read."""
        return self._written(self._of_prompt())

    def new(self, *, last: bool) -> dict[str, Any] | None:
        """Log-probabilities of the tokens since the last call; None if there are none. `last`: the choice is
        complete."""
        return self._written(self._of_answer(last=last)) if self.asked else None

    def _of_prompt(self) -> list[tuple[int, TokenLogprobs | None]]:
        logprobs = self._generation.request.logprobs
        scores = logprobs.prompt if logprobs is not None else []
        return list(zip(self._prompt, [None, *scores], strict=False))

    def _of_answer(self, *, last: bool) -> list[tuple[int, TokenLogprobs | None]]:
        found = self._generation.new_logprobs()
        if last and (ending := self._generation.ending):
            found.append(ending)
        return [(at.token, at) for at in found]

    def _written(self, found: Iterable[tuple[int, TokenLogprobs | None]]) -> dict[str, Any] | None:
        names: list[str] = []
        logprobs: list[float | None] = []
        tops: list[TokenLogprobs | None] = []
        offsets: list[int] = []
        for token, at in found:
            names.append(self._names.name(token))
            logprobs.append(None if at is None else max(at.logprob, LOWEST))
            tops.append(at)
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._names.bytes(token)))
        if not names:
            return None
        return {
            "tokens": names,
            "token_logprobs": logprobs,
            "top_logprobs": Written(partial(self._names.tops, n_top=self._n_top or 0), tops),
            "text_offset": offsets,
        }


@dataclass(frozen=True, slots=True)
class Answer:
    generation: TextGeneration
    echo: str
    """The beginning of its text."""
    logprobs: CompletionLogprobs | ChatLogprobs


def text_of_ids(vocab: Vocab, ids: Sequence[int]) -> str:
    """The text of `ids`, control tokens by their names."""
    return b"".join(map(vocab.spelling, ids)).decode("utf-8", "replace")


async def collect(served: ServedRequest, answers: Sequence[Answer]) -> bytes:
    texts = await asyncio.gather(*(answer.generation.text(answer.logprobs.advance) for answer in answers))

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


class CompletionWriter(ChunkWriter):
    """The response as events: echoes, the prompt's progress if requested, texts, a finish reason for each
    choice."""

    def __init__(self, served: ServedRequest, answers: Sequence[Answer]) -> None:
        super().__init__(served, KIND)
        self._answers = answers
        self._scored = answers[0].logprobs.asked
        self._unechoed = {index for index, answer in enumerate(answers) if answer.echo}

    def begin(self) -> bytes:
        # an echo's log-probabilities exist only after prefill
        return b"" if self._scored else b"".join(map(self._echo, sorted(self._unechoed)))

    async def write(self, index: int, part: str | None) -> bytes:
        answer, told = self._answers[index], b""
        if index in self._unread:
            told = self._progress(index, choice(index, "", None, None), read=part != "")
        if part == "":
            return told
        if self._scored and index in self._unechoed:
            told += await self._served.written(partial(self._echo, index))
        logprobs = answer.logprobs.new(last=part is None)
        if part is not None:
            return told + event(self._chunk(choice(index, part, None, logprobs)))
        reason = self._served.check(answer.generation.finish_reason)
        return told + self._finished(choice(index, "", reason, logprobs))

    def _echo(self, index: int) -> bytes:
        self._unechoed.discard(index)
        answer = self._answers[index]
        logprobs = answer.logprobs.prompt() if self._scored else None
        return event(self._chunk(choice(index, answer.echo, None, logprobs)))


def choice(
    index: int, text: str, finish_reason: str | None, logprobs: dict[str, Any] | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
