"""Answers that are not streamed: fields, usage, finish reasons."""

from time import time
from typing import Any

from qwen_serve.bench.checks.base import (
    CHAT,
    COMPLETIONS,
    INVOCATIONS,
    MESSAGES,
    PROMPT,
    Answer,
    Target,
    check,
    expect,
)
from qwen_serve.bench.checks.base import expect_equal as equal

REASONS = ("stop", "length", "tool_calls")


def completion_shape(answer: Answer) -> None:
    """Check every field of a text completion."""
    _head(answer, "text_completion")
    for index, choice in enumerate(answer["choices"]):
        equal(choice.get("index"), index, f"choices[{index}].index")
        expect(isinstance(choice.get("text"), str), f"choices[{index}].text: want a string")
        expect(choice.get("finish_reason") in REASONS, f"finish_reason: got {choice.get('finish_reason')!r}")
    usage_shape(answer)


def chat_shape(answer: Answer) -> None:
    """Check every field of a chat completion."""
    _head(answer, "chat.completion")
    for index, choice in enumerate(answer["choices"]):
        equal(choice.get("index"), index, f"choices[{index}].index")
        message = choice.get("message") or {}
        equal(message.get("role"), "assistant", "message.role")
        content = message.get("content")
        expect(isinstance(content, str) or message.get("tool_calls"), f"message.content: got {content!r}")
        expect(choice.get("finish_reason") in REASONS, f"finish_reason: got {choice.get('finish_reason')!r}")
    usage_shape(answer)


def usage_shape(answer: Answer) -> None:
    """Check the usage: integers that add up."""
    usage: Any = answer.get("usage")
    expect(isinstance(usage, dict), "usage is missing")
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        expect(type(usage.get(name)) is int, f"usage.{name}: want an integer, got {usage.get(name)!r}")
    equal(usage["total_tokens"], usage["prompt_tokens"] + usage["completion_tokens"], "usage.total_tokens")
    cached: Any = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    expect(type(cached) is int, f"usage.prompt_tokens_details.cached_tokens: want an integer, got {cached!r}")
    expect(0 <= cached <= usage["prompt_tokens"], f"cached_tokens: {cached} of {usage['prompt_tokens']}")


def _head(answer: Answer, kind: str) -> None:
    equal(answer.get("object"), kind, "object")
    expect(isinstance(answer.get("id"), str) and answer["id"], f"id: got {answer.get('id')!r}")
    expect(isinstance(answer.get("model"), str) and answer["model"], f"model: got {answer.get('model')!r}")
    created = answer.get("created")
    expect(type(created) is int and abs(created - time()) < 3600, f"created: want now, got {created!r}")
    expect(
        isinstance(answer.get("choices"), list) and answer["choices"], "choices: want a list with a choice"
    )


@check("/v1/completions answers a text_completion with usage")
async def completions(target: Target) -> None:
    completion_shape(await target.complete())


@check("/v1/chat/completions answers a chat.completion with usage")
async def chat(target: Target) -> None:
    chat_shape(await target.chat())


@check("/invocations with a prompt answers a text_completion, from the request as published")
async def invocations_prompt(target: Target) -> None:
    completion_shape(await target.ask(INVOCATIONS, prompt=PROMPT, max_tokens=16, temperature=0.0))


@check("/invocations with messages answers a chat.completion, from the request as published")
async def invocations_messages(target: Target) -> None:
    body = {"model": "Qwen/Qwen3.5-4B", "messages": MESSAGES, "max_tokens": 64, "temperature": 0.0}
    chat_shape(await target.ask(INVOCATIONS, **body))


@check("/invocations with a prompt gives the text of /v1/completions, with temperature 0 when it is absent")
async def invocations_is_completions(target: Target) -> None:
    text = await target.text()
    for fields in ({"temperature": 0.0}, {}):
        answer = await target.ask(INVOCATIONS, prompt=PROMPT, max_tokens=16, **fields)
        equal(answer["choices"][0]["text"], text, f"text of /invocations with {fields or 'no temperature'}")


@check("/v1/completions is raw: no template around the prompt")
async def raw(target: Target) -> None:
    prompt = (await target.complete("Hello", max_tokens=1))["usage"]["prompt_tokens"]
    chat = (await target.chat([{"role": "user", "content": "Hello"}], max_tokens=1))["usage"]["prompt_tokens"]
    expect(prompt + 3 <= chat, f"prompt_tokens of 'Hello': {prompt} raw, {chat} as a chat")


@check("any `model` is accepted and echoed")
async def model_echo(target: Target) -> None:
    name = "someone/Some-Model"
    for path, body in ((COMPLETIONS, {"prompt": PROMPT}), (CHAT, {"messages": MESSAGES})):
        answer = await target.ask(path, model=name, max_tokens=2, temperature=0.0, **body)
        equal(answer.get("model"), name, f"model of {path}")


@check("the tier that a request is served in is told where it asks for one")
async def service_tier(target: Target) -> None:
    for path, body in ((COMPLETIONS, {"prompt": PROMPT}), (CHAT, {"messages": MESSAGES})):
        answer = await target.ask(path, service_tier="default", max_tokens=2, temperature=0.0, **body)
        equal(answer.get("service_tier"), "default", f"service_tier of {path}")


@check("max_tokens tokens are generated, counted, and finish_reason is `length`")
async def finish_length(target: Target) -> None:
    for count in (1, 7, 32):
        for answer in (
            await target.complete(max_tokens=count, ignore_eos=True),
            await target.chat(max_tokens=count, ignore_eos=True),
        ):
            equal(answer["usage"]["completion_tokens"], count, "completion_tokens")
            equal(answer["choices"][0]["finish_reason"], "length", "finish_reason")


@check("an answer that ends by itself has finish_reason `stop`")
async def finish_stop(target: Target) -> None:
    answer = await target.chat(max_tokens=512)
    equal(answer["choices"][0]["finish_reason"], "stop", "finish_reason")
    expect(answer["usage"]["completion_tokens"] < 512, "completion_tokens: want fewer than max_tokens")


@check("usage.prompt_tokens is what the tokenizer counts")
async def prompt_count(target: Target) -> None:
    vocabulary = target.tokenizer()
    for prompt in ("Hello", PROMPT, "Zürich 東京 🦊 1234567890\n\n\tx"):
        counted = await vocabulary.count(prompt)
        claimed = (await target.complete(prompt, max_tokens=1))["usage"]["prompt_tokens"]
        expect(
            claimed in (counted, counted + 1), f"prompt_tokens of {prompt[:20]!r}: {counted}, got {claimed}"
        )


@check("usage.completion_tokens is what the tokenizer counts in the text")
async def completion_count(target: Target) -> None:
    vocabulary = target.tokenizer()
    for answer, text in (
        (raw := await target.complete(max_tokens=64), raw["choices"][0]["text"]),
        (chat := await target.chat(max_tokens=128), chat["choices"][0]["message"]["content"]),
    ):
        counted = await vocabulary.count(text)
        claimed = answer["usage"]["completion_tokens"]
        expect(
            abs(counted - claimed) <= max(2, 0.02 * counted), f"want {counted} for the text, got {claimed}"
        )
