"""OpenAI's Responses API, stateless: answers and events. Skipped for servers without the endpoint."""

import json
from typing import Any

from qwen_serve.bench.checks.base import QUESTION, Answer, Target, check, expect
from qwen_serve.bench.checks.base import expect_equal as equal

PATH = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def body_of(**fields: Any) -> dict[str, Any]:
    return {"model": "any", "input": QUESTION, "max_output_tokens": 64, "temperature": 0.0, **fields}


async def ask(target: Target, **fields: Any) -> Answer:
    await target.needs("POST", PATH)
    return await target.ask(PATH, **body_of(**fields))


def text_in(response: Answer) -> str:
    messages = [item for item in response["output"] if item["type"] == "message"]
    return "".join(part["text"] for item in messages for part in item["content"])


@check("a response has OpenAI's shape")
async def shape(target: Target) -> None:
    response = await ask(target)
    equal((response.get("object"), response.get("model")), ("response", "any"), "object and model")
    expect(response.get("status") in ("completed", "incomplete"), f"status: got {response.get('status')!r}")
    expect(text_in(response), f"output: want text, got {response.get('output')!r}")
    usage = response["usage"]
    equal(usage["input_tokens"] + usage["output_tokens"], usage["total_tokens"], "total_tokens")
    expect(isinstance(usage["input_tokens_details"]["cached_tokens"], int), "cached_tokens: want a count")


@check("a streamed response's events are numbered, in order, and join to what is answered unstreamed")
async def events(target: Target) -> None:
    whole = await ask(target)
    found = [json.loads(data) async for _, data in target.client.events(PATH, body_of(stream=True))]
    equal([event["sequence_number"] for event in found], list(range(len(found))), "sequence_number")
    kinds = [event["type"].removeprefix("response.") for event in found]
    equal(kinds[:2], ["created", "in_progress"], "first events")
    equal(kinds[-1], whole["status"], "last event")
    steps = [kind for number, kind in enumerate(kinds[2:-1], 2) if kind != kinds[number - 1]]
    item = ["output_item.added", "content_part.added", "output_text.delta"]
    item += ["output_text.done", "content_part.done", "output_item.done"]
    equal(steps, item, "events of the one item")
    deltas = [event["delta"] for event in found if event["type"] == "response.output_text.delta"]
    equal("".join(deltas), text_in(whole), "text")
    equal(text_in(found[-1]["response"]), text_in(whole), "text of the last event's response")


@check("max_output_tokens ends a response as incomplete")
async def incomplete(target: Target) -> None:
    response = await ask(target, max_output_tokens=2)
    equal(response["status"], "incomplete", "status")
    equal(response["incomplete_details"], {"reason": "max_output_tokens"}, "incomplete_details")
    equal(response["usage"]["output_tokens"], 2, "output_tokens")


@check("reasoning comes as an item in front of the message")
async def reasoning(target: Target) -> None:
    response = await ask(target, reasoning={"effort": "low"}, max_output_tokens=target.thinking_tokens)
    equal(response["output"][0]["type"], "reasoning", "type of the first item")
    expect(response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0, "no reasoning_tokens")


@check("instructions, items, tools and tool results reach the prompt")
async def items(target: Target) -> None:
    call = {"type": "function_call", "call_id": "1", "name": "get_weather", "arguments": '{"city": "Paris"}'}
    result = {"type": "function_call_output", "call_id": "1", "output": "Sunny"}
    message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]}
    grown: list[dict[str, Any]] = [
        {"input": [message]},
        {"input": [message], "instructions": "Be brief."},
        {"input": [message], "instructions": "Be brief.", "tools": [TOOL]},
        {"input": [message, call, result], "instructions": "Be brief.", "tools": [TOOL]},
    ]
    before = 0
    for fields in grown:
        counted = (await ask(target, **fields, max_output_tokens=1))["usage"]["input_tokens"]
        expect(counted > before, f"input_tokens: {before} before, {counted} with more in the prompt")
        before = counted


@check("log-probabilities of a response's text: bytes that spell it, alternatives in order")
async def logprobs(target: Target) -> None:
    response = await ask(target, include=["message.output_text.logprobs"], top_logprobs=2)
    [message] = [item for item in response["output"] if item["type"] == "message"]
    [part] = message["content"]
    spelled = b"".join(bytes(told["bytes"]) for told in part["logprobs"])
    equal(spelled.decode("utf-8", "replace"), part["text"], "text that the bytes spell")
    for told in part["logprobs"]:
        found = [other["logprob"] for other in told["top_logprobs"]]
        equal(len(found), 2, "alternatives")
        expect(found == sorted(found, reverse=True), f"top_logprobs: want the likeliest first, got {found}")


@check(
    "refused: what would need a memory of responses, a forced tool that is no function, a chat's own fields"
)
async def refusals(target: Target) -> None:
    await target.needs("POST", PATH)
    for fields in (
        {"previous_response_id": "resp_1"},
        {"tool_choice": "required", "tools": [{"type": "web_search"}]},
        {"input": None},
        {"max_tokens": 5},
    ):
        reply = await target.client.request("POST", PATH, body=body_of(**fields))
        equal(reply.status, 400, f"status for {next(iter(fields))}")
        expect(next(iter(fields)) in reply.text, f"the error does not name {next(iter(fields))}")
