"""Anthropic's Messages API: answers, events and token counts. Skipped for servers without the endpoint."""

import json
from typing import Any

from qwen_serve.bench.checks.base import MESSAGES, Answer, Target, check, expect
from qwen_serve.bench.checks.base import expect_equal as equal
from qwen_serve.bench.load.client import clip
from qwen_serve.bench.load.protocol import FILLER

PATH = "/v1/messages"
TOOL = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
STOPS = ("end_turn", "max_tokens", "stop_sequence", "tool_use")


def body_of(**fields: Any) -> dict[str, Any]:
    return {"model": "any", "messages": MESSAGES, "max_tokens": 64, "temperature": 0.0, **fields}


async def ask(target: Target, **fields: Any) -> Answer:
    await target.needs("POST", PATH)
    return await target.ask(PATH, **body_of(**fields))


async def events_of(target: Target, **fields: Any) -> list[Answer]:
    """The events of a stream, without pings."""
    await target.needs("POST", PATH)
    body = body_of(**fields, stream=True)
    events = [json_of(data) async for _, data in target.client.events(PATH, body)]
    return [event for event in events if event["type"] != "ping"]


def json_of(data: str) -> Answer:
    expect(data != "[DONE]", "a stream of this protocol has no [DONE]")
    return json.loads(data)  # type: ignore[no-any-return]


def text_in(message: Answer) -> str:
    return "".join(block["text"] for block in message["content"] if block["type"] == "text")


@check("a message has Anthropic's shape")
async def shape(target: Target) -> None:
    message = await ask(target)
    equal((message.get("type"), message.get("role")), ("message", "assistant"), "type and role")
    expect(isinstance(message.get("id"), str) and message["id"], "id: want a string")
    equal(message.get("model"), "any", "model")
    expect(text_in(message), f"content: want text, got {message.get('content')!r}")
    expect(message.get("stop_reason") in STOPS, f"stop_reason: got {message.get('stop_reason')!r}")
    for name in ("input_tokens", "output_tokens"):
        expect(isinstance(message["usage"].get(name), int), f"usage.{name}: want a count")


@check("a streamed message's events come in order and join to what is answered unstreamed")
async def events(target: Target) -> None:
    whole = await ask(target)
    found = await events_of(target)
    kinds = [event["type"] for event in found]
    equal(kinds[0], "message_start", "first event")
    equal(kinds[-2:], ["message_delta", "message_stop"], "last events")
    open_, last = -1, -1
    for event in found[1:-2]:
        if event["type"] == "content_block_start":
            equal((open_, event["index"]), (-1, last + 1), "open block and the next one's index")
            open_ = last = event["index"]
        else:
            equal(event["index"], open_, f"index of a {event['type']}")
            open_ = -1 if event["type"] == "content_block_stop" else open_
    equal(open_, -1, "open block at the end")
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    equal("".join(delta.get("text", "") for delta in deltas), text_in(whole), "text")
    equal(found[-2]["delta"]["stop_reason"], whole["stop_reason"], "stop_reason")
    equal(found[-2]["usage"]["output_tokens"], whole["usage"]["output_tokens"], "output_tokens")


@check("stop_reason is `max_tokens` at the limit, `stop_sequence` with its text at a stop sequence")
async def stop_reasons(target: Target) -> None:
    limited = await ask(target, max_tokens=2)
    equal((limited["stop_reason"], limited["usage"]["output_tokens"]), ("max_tokens", 2), "at the limit")
    text = text_in(await ask(target))
    stop = text[len(text) // 2 :][:4]
    expect(len(stop) > 1, "the answer is too short to stop in it")
    stopped = await ask(target, stop_sequences=[stop])
    equal((stopped["stop_reason"], stopped["stop_sequence"]), ("stop_sequence", stop), "at the stop sequence")
    equal(text_in(stopped), text[: text.index(stop)], "text before it")


@check("system text, tools and tool results reach the prompt; count_tokens tells how long it is")
async def count_tokens(target: Target) -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Sunny"}
    turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    grown: list[dict[str, Any]] = [
        {},
        {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]},
        {"system": "Be brief.", "tools": [TOOL]},
        {"system": "Be brief.", "tools": [TOOL], "messages": [*MESSAGES, *turns]},
    ]
    before = 0
    for fields in grown:
        usage = (await ask(target, **fields, max_tokens=1))["usage"]
        total = usage["input_tokens"] + (usage.get("cache_read_input_tokens") or 0)
        asked = body_of(**fields)
        del asked["max_tokens"]
        counted = (await target.ask(f"{PATH}/count_tokens", **asked))["input_tokens"]
        equal(counted, total, "count_tokens and usage")
        expect(counted > before, f"input_tokens: {before} before, {counted} with more in the prompt")
        before = counted


@check("thinking comes as a thinking block in front of the text, and may come back in the history")
async def thinking(target: Target) -> None:
    fields = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": target.thinking_tokens}
    message = await ask(target, **fields)
    first = message["content"][0]
    equal(first["type"], "thinking", "type of the first block")
    expect(first["thinking"] and isinstance(first.get("signature"), str), "want thinking and a signature")
    turns = [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": "And 3+3?"}]
    await ask(target, messages=[*MESSAGES, *turns])


@check("Claude Code's nonce in the system prompt does not keep the rest from the prompt cache")
async def nonce(target: Target) -> None:
    def system(nonce: str) -> list[dict[str, str]]:
        header = f"x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={nonce};"
        return [{"type": "text", "text": header}, {"type": "text", "text": FILLER * 60}]

    await ask(target, system=system("fa690"))
    usage = (await ask(target, system=system("1c8b4")))["usage"]
    cached, rest = usage.get("cache_read_input_tokens") or 0, usage["input_tokens"]
    expect(cached > rest, f"{cached} tokens came from the cache, {rest} did not")


@check("refused with Anthropic's error object: no max_tokens, no messages, an image")
async def refusals(target: Target) -> None:
    await target.needs("POST", PATH)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    bodies = [
        {"messages": MESSAGES},
        {"max_tokens": 4},
        {"max_tokens": 4, "messages": [{"role": "user", "content": [image]}]},
    ]
    for body in bodies:
        reply = await target.client.request("POST", PATH, body=body)
        equal(reply.status, 400, f"status for {clip(str(body), 60)}")
        answer = reply.json()
        equal(answer.get("type"), "error", "type")
        equal(answer["error"].get("type"), "invalid_request_error", "error.type")
        expect(answer["error"].get("message"), "error.message: want a sentence")
