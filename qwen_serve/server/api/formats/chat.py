"""Chat completions: /v1/chat/completions, and /invocations with messages."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

from fastapi import Response
from pydantic import BeforeValidator, Field, model_validator

from qwen_serve.server.api.context import RequestContext
from qwen_serve.server.api.errors import bad_request
from qwen_serve.server.api.fields.generation import GenerationRequest
from qwen_serve.server.api.fields.sampling import Mode
from qwen_serve.server.api.fields.structured import (
    WantedGrammar,
    calls_format,
    check_tool_choice,
    forced_tools,
    wanted_grammar,
)
from qwen_serve.server.api.fields.thinking import ThinkingFields
from qwen_serve.server.api.fields.unsupported import ELSEWHERE, UNSUPPORTED
from qwen_serve.server.api.formats.chat_inputs import (
    MessageInput,
    ProcessorKwargs,
    ToolInput,
)
from qwen_serve.server.api.formats.chunks import ChunkWriter
from qwen_serve.server.api.formats.left_out import names_of, noted
from qwen_serve.server.api.logprobs import ChatLogprobs, prompt_logprobs
from qwen_serve.server.api.request import encode_images, ensure_loaded, prepared
from qwen_serve.server.api.service import Service
from qwen_serve.server.api.serving import (
    ServedRequest,
    check_count,
    compiled,
    prompt_budget,
    stop_strings,
    truncated,
)
from qwen_serve.server.api.sse import encode, event
from qwen_serve.server.api.tenant import placement_of
from qwen_serve.server.chat import (
    NOTHING_YET,
    Arguments,
    Content,
    Part,
    PromptError,
    Reasoning,
    Reply,
    ReplyOptions,
    ReplyParser,
    StopStrings,
    ToolCall,
    check_conversation,
)
from qwen_serve.server.chat.formats import AnswerFormat
from qwen_serve.server.chat.pictures import NO_BOUNDS, GivenPicture, PixelBounds, cached_images, insert_images
from qwen_serve.server.chat.tool_formats import ToolFormat
from qwen_serve.server.engine import MAX_LOGPROBS, InvalidPrompt, Prompt
from qwen_serve.server.engine.pictures import Picture

KIND = "chat.completion"
CHUNK = "chat.completion.chunk"

MAX_MESSAGES = 16_384
MAX_TOOLS = 1024


def described_as(kind: Any) -> BeforeValidator:
    """Sets the schema of a field in OpenAPI, if the field is checked later."""
    return BeforeValidator(lambda value: value, json_schema_input_type=kind)


class ChatRequest(ThinkingFields, GenerationRequest):
    """A conversation. The contents of messages and tools are checked when they are rendered."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        name: values
        for name, values in {**UNSUPPORTED, "echo": (False,), **dict.fromkeys(ELSEWHERE, ("",))}.items()
        if name not in ("add_generation_prompt", "continue_final_message", "mm_processor_kwargs")
    }
    instead: ClassVar[dict[str, str]] = ELSEWHERE

    messages: Annotated[
        list[dict[str, Any]], described_as(Annotated[list[MessageInput], Field(min_length=1)])
    ] = Field(fail_fast=True, max_length=MAX_MESSAGES)
    tools: Annotated[list[dict[str, Any]] | None, described_as(list[ToolInput] | None)] = Field(
        None, fail_fast=True, max_length=MAX_TOOLS
    )
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        BeforeValidator(check_tool_choice, json_schema_input_type=str | dict[str, Any] | None),
    ] = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = Field(None, fail_fast=True, max_length=MAX_TOOLS)
    """The older form of `tools`. The answer has the older form, too."""
    function_call: str | dict[str, Any] | None = None
    """The older form of `tool_choice`."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    reasoning_format: Literal["auto", "deepseek", "none"] | None = None
    mm_processor_kwargs: ProcessorKwargs | None = None

    @property
    def pixel_bounds(self) -> PixelBounds:
        """The bounds of all pictures without their own."""
        asked = self.mm_processor_kwargs
        return NO_BOUNDS if asked is None else PixelBounds(asked.min_pixels, asked.max_pixels)

    def inlines_reasoning(self, default: bool) -> bool:
        """Whether the think block stays in the content; `default` is the server's setting."""
        if self.include_reasoning is False:
            return False
        asked = self.reasoning_format == "none" or self.separate_reasoning is False
        return asked or (default and self.reasoning_format != "deepseek" and not self.separate_reasoning)

    @model_validator(mode="after")
    def _older_form(self) -> Self:
        """Raises ApiError 400 for both forms of tools."""
        for older, newer in (("functions", "tools"), ("function_call", "tool_choice")):
            if getattr(self, older) and getattr(self, newer):
                raise bad_request(older, f"the older form of {newer}; give one")
        if self.functions:
            self.tools = [{"type": "function", "function": function} for function in self.functions]
            self.parallel_tool_calls = False
            choice = self.function_call
            if isinstance(choice, dict):
                choice = {"type": "function", "function": choice}
            try:
                self.tool_choice = check_tool_choice(choice)
            except ValueError:
                raise bad_request("function_call", 'must be "none", "auto" or {"name": ...}') from None
        return self

    @model_validator(mode="after")
    def _one_way_to_go_on(self) -> Self:
        """Raises ApiError 400 as vLLM does."""
        if self.continue_final_message and self.add_generation_prompt:
            raise bad_request(
                "continue_final_message", "add_generation_prompt must be false, or left out, beside it"
            )
        return self

    @property
    def continues(self) -> bool:
        """Whether the reply continues the last message, on request or because that is an assistant's text."""
        if self.continue_final_message is not None or self.add_generation_prompt is not None:
            return bool(self.continue_final_message)
        last = self.messages[-1] if self.messages else {}
        return last.get("role") == "assistant" and not last.get("tool_calls")

    @model_validator(mode="after")
    def _top_only_with_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs", "needs logprobs to be true")
        return self

    @property
    def answer_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else super().answer_logprobs

    @property
    def by_n_probs(self) -> bool:
        return super().by_n_probs and not self.logprobs

    def mode(self, *, thinking: bool, can_think: bool) -> Mode:
        return "thinking" if can_think and self.thinks(thinking) else "instruct"

    @property
    def whole(self) -> bool:
        """As for other requests; but a tool call ends an answer that may have only one call."""
        return super().whole and self.parallel_tool_calls is not False

    def wanted_format(self, special: Sequence[str]) -> AnswerFormat | ToolFormat | None:
        """The required format of the answer or its calls. Raises PromptError and ApiError 400."""
        answer = self.answer_format(special)
        parallel = self.parallel_tool_calls is not False
        tools = self.offered_tools
        calls = calls_format(self.tool_choice, tools, parallel=parallel, beside=answer)
        if (wanted := calls or answer) is not None and self.continues:
            raise bad_request(wanted.param, "contradicts a message that the reply continues")
        return self._with_an_end(wanted)

    def check_messages(self) -> None:
        """Raises PromptError for what is wrong with the conversation, whatever the model."""
        check_conversation(self.messages, self.offered_tools, continue_final_message=self.continues)

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools offered to the model."""
        if self.tool_choice == "none":
            return None
        return [tool for tool in self.tools or [] if _is_function(tool)] or None

    @property
    def tools_left_out(self) -> str:
        """Names of the tools that are no functions."""
        return names_of(tool for tool in self.tools or [] if not _is_function(tool))


def _is_function(tool: dict[str, Any]) -> bool:
    return tool.get("type") in (None, "function") or "function" in tool


async def chat(context: RequestContext, request: ChatRequest) -> Response:
    """Answer a conversation."""
    inline = request.inlines_reasoning(context.service.settings.inline_reasoning)
    served, replies = await begin(context, request, "chatcmpl-", inline_reasoning=inline)
    older = bool(request.functions)
    writer = ChatWriter(served, replies, older=older)
    response = await served.respond(replies, writer, partial(collect, served, replies, older=older))
    return noted(response, request.tools_left_out)


async def begin(
    context: RequestContext, request: ChatRequest, prefix: str, *, inline_reasoning: bool = False
) -> tuple[ServedRequest, list[Reply]]:
    """Submits a conversation in any format, and returns a reply for each choice.

    `prefix` starts the response's id.
    """
    service = context.service

    def check() -> None:
        wanted_grammar(request.wanted_format(()), thinking=False)
        request.check_messages()

    placement = placement_of(context, request)
    backend = await ensure_loaded(context, check)
    engine, prompter = backend.engine, backend.prompter
    check_count(engine.settings, request)

    given: list[GivenPicture] = []
    bare: list[int] = []
    """The prompt's ids, if it has pictures."""
    known: list[Picture] = []
    """The first of the pictures, as far as they are cached. If all of them are cached, no thread is
    needed."""

    def insert(interrupt: Callable[[], None]) -> Prompt:
        return engine.prompt(
            *insert_images(bare, given, engine, interrupt, placement.salt, request.pixel_bounds, known)
        )

    def prepare(
        interrupt: Callable[[], None],
    ) -> tuple[Prompt | None, bool, StopStrings | None, WantedGrammar | None]:
        format_ = request.wanted_format(engine.vocab.added_tokens)
        budget = prompt_budget(request, engine.context_size, interrupt)
        given.clear()  # `work` may begin twice
        ids, thinking = prompt_of(service, request, budget, None if engine.encoder is None else given)
        if given:
            check_uncut(request)
            bare[:] = ids
            known[:] = cached_images(given, engine, placement.salt, request.pixel_bounds)
            prompt = insert(interrupt) if len(known) == len(given) else None
        else:
            prompt = engine.prompt(truncated(ids, request, engine.context_size))
        request.messages = []  # frees the messages for the time of the answer
        return prompt, thinking, stop_strings(request), wanted_grammar(format_, thinking=thinking)

    prompt, thinking, stops, wanted = await prepared(context, prepare)
    if prompt is None:
        engine.check_queue(placement.scheduling)
        prompt = await encode_images(context, insert, given)
    tools, limits = request.offered_tools, None
    if thinking:
        limits = request.thinking_limits(service.settings, backend, request.token_limit, calls=bool(tools))
    constrain = await compiled(context, request, wanted)
    served = ServedRequest(
        *(context, request, placement, [prompt], stops, prefix, constrain, limits, prompter.tags)
    )
    one_call, told = request.parallel_tool_calls is False, request.include_reasoning is not False
    replies = []
    for generation in served.generations:
        parser = ReplyParser(
            thinking=thinking,
            inline_reasoning=inline_reasoning,
            tools=tools,
            forced=forced_tools(request.tool_choice, tools),
            tokens=prompter.tags.values(),
            enforced=wanted is not None,
            closed=prompter.closes_thinking,
            stops=generation.stops,
            stop_tokens=bool(request.stop_token_ids),
        )
        replies.append(Reply(generation, parser, one_call=one_call, reasoning=told))
    return served, replies


def check_uncut(request: ChatRequest) -> None:
    """Refuses to truncate a request with pictures. Raises ApiError 400."""
    if request.truncate_prompt_tokens is not None:
        raise bad_request("truncate_prompt_tokens", "a prompt with pictures is not cut; leave it out")


def prompt_of(
    service: Service,
    request: ChatRequest,
    check: Callable[[int], None],
    pictures: list[GivenPicture] | None = None,
) -> tuple[list[int], bool]:
    """The conversation's token ids, and whether the reply begins with reasoning. `check` is called with ids
    as they come. The messages' pictures are appended to `pictures`; if it is None they are refused. Raises
    PromptError, and what `check` raises."""
    prompter = service.backend.prompter
    how: ReplyOptions = {
        "enable_thinking": request.thinks(service.settings.thinking) and prompter.can_think,
        "add_generation_prompt": request.add_generation_prompt is not False,
        "continue_final_message": request.continues,
    }
    try:
        ids = prompter.chat(
            request.messages,
            check,
            tools=request.offered_tools,
            template_kwargs=request.template_variables(prompter),
            pictures=pictures,
            **how,
        )
    except InvalidPrompt as error:
        raise PromptError("messages", f"{error}") from error
    return ids, prompter.reply_reasons(request.messages, **how)


async def collect(served: ServedRequest, replies: list[Reply], *, older: bool) -> bytes:
    scored = [ChatLogprobs(served.request, served.vocab, reply.generation) for reply in replies]
    messages = await asyncio.gather(*map(message_of, replies, scored))

    def written() -> bytes:
        choices = [
            {
                "index": index,
                "message": in_older_form(message) if older else message,
                "logprobs": logprobs.all(),
                "finish_reason": ended(served.check(reply.finish_reason), older=older),
            }
            for index, (message, reply, logprobs) in enumerate(zip(messages, replies, scored, strict=True))
        ]
        scores = prompt_logprobs(served.request, served.vocab, replies[0].generation)
        around = {**served.envelope(KIND, choices), "usage": served.usage()}
        return encode({**around, **scores, **served.extras()})

    return await served.written(written)


async def message_of(reply: Reply, logprobs: ChatLogprobs) -> dict[str, Any]:
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
        logprobs.advance()
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    message |= {"reasoning_content": reasoning} if reasoning else {}
    if calls:
        message["tool_calls"] = [tool_call(call, arguments.get(call.index, "")) for call in calls]
    return message


class ChatWriter(ChunkWriter):
    """The response as events.

    The role is sent with a choice's first token and not before, so that clients that time the first chunk
    measure TTFT. Prompt progress, if requested, is sent earlier.
    """

    def __init__(self, served: ServedRequest, replies: Sequence[Reply], *, older: bool) -> None:
        super().__init__(served, CHUNK)
        self._older = older
        self._replies = replies
        self._logprobs = [ChatLogprobs(served.request, served.vocab, reply.generation) for reply in replies]
        self._started: set[int] = set()

    async def write(self, index: int, part: Part | None) -> bytes:
        told = b""
        if index in self._unread:
            told = self._progress(index, self._choice(index, {}), read=part != NOTHING_YET)
        if part == NOTHING_YET:
            return told
        delta: dict[str, Any] = {} if part is None else delta_of(part)
        reason = None
        if part is None:
            reason = ended(self._served.check(self._replies[index].finish_reason), older=self._older)
        elif self._older:
            delta = in_older_form(delta)
        logprobs = self._logprobs[index].new()
        choice = self._choice(index, delta, logprobs, reason)
        return told + (self._finished(choice) if part is None else event(self._chunk(choice)))

    def _choice(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        if index not in self._started:
            self._started.add(index)
            delta = {"role": "assistant", "content": "", **delta}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


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


def in_older_form(message: dict[str, Any]) -> dict[str, Any]:
    """A message, or a piece of one, with its call as a `function_call`."""
    calls = message.pop("tool_calls", None)
    return {**message, "function_call": calls[0]["function"]} if calls else message


def ended(reason: str, *, older: bool) -> str:
    """The finish reason; in the older form a call has another."""
    return "function_call" if older and reason == "tool_calls" else reason
