"""Thinking: off by default, switched on by any of three fields, and separate from the answer."""

from typing import Any

from qwen_serve.bench.checks.base import CHAT, INVOCATIONS, MESSAGES, Answer, Target, check, expect
from qwen_serve.bench.checks.base import expect_equal as equal

ON: tuple[dict[str, Any], ...] = (
    {"chat_template_kwargs": {"enable_thinking": True}},
    {"thinking": True},
    {"reasoning_effort": "medium"},
)
OFF: tuple[dict[str, Any], ...] = (
    {},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"thinking": False},
    {"reasoning_effort": "none"},
)
QUESTION = [{"role": "user", "content": "What is 17+25?"}]


@check("off by default and when switched off: no reasoning, no tags in the content")
async def off(target: Target) -> None:
    for fields in OFF:
        message = (await target.chat(QUESTION, **fields))["choices"][0]["message"]
        expect(not message.get("reasoning_content"), f"{fields or 'default'}: there is reasoning_content")
        expect("think>" not in message["content"], f"{fields or 'default'}: a think tag is in the content")
        expect(message["content"].strip(), f"{fields or 'default'}: the content is empty")


@check("on in each of the three spellings: reasoning_content, and no tags anywhere")
async def on(target: Target) -> None:
    for fields in ON:
        _reasoned(await target.chat(QUESTION, max_tokens=target.thinking_tokens, **fields), fields)


@check("on by `messages` on /invocations as well")
async def on_invocations(target: Target) -> None:
    body = {"messages": QUESTION, "max_tokens": target.thinking_tokens, "temperature": 0.0, "thinking": True}
    _reasoned(await target.ask(INVOCATIONS, **body), {"thinking": True})


@check("cut off while thinking: reasoning only, finish_reason `length`, no unclosed tag")
async def truncated(target: Target) -> None:
    answer = await target.chat(QUESTION, max_tokens=3, thinking=True, ignore_eos=True)
    message = answer["choices"][0]["message"]
    equal(answer["choices"][0]["finish_reason"], "length", "finish_reason")
    expect(not message.get("content"), f"content: want none yet, got {message.get('content')!r}")
    expect(message.get("reasoning_content"), "reasoning_content is empty")


@check("streamed: all reasoning comes before the answer, and both are what is answered unstreamed")
async def streamed_order(target: Target) -> None:
    body = {"messages": QUESTION, "max_tokens": target.thinking_tokens, "temperature": 0.0, "thinking": True}
    chunks = await target.chunks(CHAT, **body)
    kinds = [
        "reasoning" if delta.get("reasoning_content") else "content"
        for chunk in chunks
        for choice in chunk["choices"]
        if (delta := choice["delta"]).get("reasoning_content") or delta.get("content")
    ]
    expect("reasoning" in kinds, "no delta has reasoning_content")
    expect("content" in kinds, f"no answer within {target.thinking_tokens} tokens (--thinking-tokens)")
    expect(kinds == sorted(kinds, reverse=True), "reasoning_content comes after content")
    message = (await target.ask(CHAT, **body))["choices"][0]["message"]
    for name in ("reasoning_content", "content"):
        text = "".join(choice["delta"].get(name) or "" for chunk in chunks for choice in chunk["choices"])
        expect("think>" not in text, f"a think tag is in {name}")
        equal(text, message[name], name)


@check("reasoning tokens are counted as completion tokens")
async def counted(target: Target) -> None:
    without = (await target.chat(MESSAGES))["usage"]["completion_tokens"]
    answer = await target.chat(MESSAGES, thinking=True, max_tokens=target.thinking_tokens)
    vocabulary = target.tokenizer()
    message = answer["choices"][0]["message"]
    text = await vocabulary.count((message.get("reasoning_content") or "") + (message.get("content") or ""))
    claimed = answer["usage"]["completion_tokens"]
    expect(claimed >= text * 0.98 - 2, f"completion_tokens: {text} tokens of text, {claimed} claimed")
    expect(claimed <= text + 8, f"completion_tokens: {text} tokens of text and tags, {claimed} claimed")
    thought = await vocabulary.count(message.get("reasoning_content") or "")
    told: Any = (answer["usage"].get("completion_tokens_details") or {}).get("reasoning_tokens")
    expect(
        type(told) is int, f"usage.completion_tokens_details.reasoning_tokens: want an integer, got {told!r}"
    )
    expect(
        thought * 0.98 - 2 <= told <= thought + 8, f"reasoning_tokens: {told}, {thought} tokens of reasoning"
    )
    expect(without > 0, "an answer without thinking has no tokens")


def _reasoned(answer: Answer, fields: dict[str, Any]) -> None:
    message = answer["choices"][0]["message"]
    reasoning, content = message.get("reasoning_content"), message.get("content") or ""
    expect(isinstance(reasoning, str) and reasoning.strip(), f"{fields}: no reasoning_content")
    expect("think>" not in reasoning + content, f"{fields}: a think tag is left in the text")
    if answer["choices"][0]["finish_reason"] != "length":
        expect(content.strip(), f"{fields}: reasoning, but no answer")
