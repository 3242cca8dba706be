"""Chats: roles, content parts, tools, and content that imitates control tokens."""

import json
from typing import Any

from qwen_serve.bench.checks.base import MESSAGES, Target, check, expect
from qwen_serve.bench.checks.base import expect_equal as equal
from qwen_serve.bench.checks.shapes import chat_shape

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "system": [{"role": "system", "content": "Be brief."}, *MESSAGES],
    "developer": [{"role": "developer", "content": "Be brief."}, *MESSAGES],
    "several turns": [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I help?"},
        *MESSAGES,
    ],
    "reasoning in the history": [
        {"role": "user", "content": "What is 1+1?"},
        {"role": "assistant", "content": "2", "reasoning_content": "One and one make two."},
        *MESSAGES,
    ],
    "content parts": [{"role": "user", "content": [{"type": "text", "text": "What is 2+2?"}]}],
    "a tool's result": [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny, 21 degrees"},
    ],
}


@check("system, developer, assistant and tool messages and content parts are accepted")
async def conversations(target: Target) -> None:
    for name, messages in CONVERSATIONS.items():
        tools = {"tools": [TOOL]} if "tool" in name else {}
        reply = await target.client.request(
            "POST", "/v1/chat/completions", body={"messages": messages, "max_tokens": 8, **tools}
        )
        expect(reply.status == 200, f"{name}: want 200, got {reply.status}: {reply.text[:200]}")
        chat_shape(reply.json())


@check("content parts mean what the joined string means")
async def content_parts(target: Target) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+2?"}]
    joined = await target.chat()
    split = await target.chat([{"role": "user", "content": parts}])
    equal(split["choices"][0]["message"]["content"], joined["choices"][0]["message"]["content"], "content")
    equal(split["usage"]["prompt_tokens"], joined["usage"]["prompt_tokens"], "usage.prompt_tokens")


@check("the system message and the tools reach the prompt")
async def prompt_grows(target: Target) -> None:
    plain = (await target.chat())["usage"]["prompt_tokens"]
    system = (await target.chat(CONVERSATIONS["system"]))["usage"]["prompt_tokens"]
    tools = (await target.chat(tools=[TOOL]))["usage"]["prompt_tokens"]
    expect(system > plain, f"prompt_tokens: {plain} without, {system} with a system message")
    expect(tools > plain + 20, f"prompt_tokens: {plain} without, {tools} with a tool")


@check("tool calls, if the model makes any, are OpenAI's, with finish_reason `tool_calls`")
async def tool_calls(target: Target) -> None:
    question = [{"role": "user", "content": "What is the weather in Paris? Use the tool."}]
    answer = await target.chat(question, tools=[TOOL], max_tokens=256)
    choice = answer["choices"][0]
    calls = choice["message"].get("tool_calls") or []
    if not calls:
        expect(choice["finish_reason"] != "tool_calls", "finish_reason is tool_calls, but there are none")
    for call in calls:
        equal(call.get("type"), "function", "tool_calls[].type")
        expect(isinstance(call.get("id"), str) and call["id"], "tool_calls[].id: want a string")
        expect(isinstance(call["function"].get("arguments"), str), "arguments: want a JSON string")
    if calls and choice["finish_reason"] != "length":
        equal(choice["finish_reason"], "tool_calls", "finish_reason")


@check("several and late system messages are accepted, and all of them reach the prompt")
async def system_messages(target: Target) -> None:
    one = (await target.chat(CONVERSATIONS["system"]))["usage"]["prompt_tokens"]
    late = [*CONVERSATIONS["system"], {"role": "system", "content": "Be very kind."}]
    two = (await target.chat(late))["usage"]["prompt_tokens"]
    expect(two > one, f"prompt_tokens: {one} with one system message, {two} with two")


@check("continue_final_message goes on from the assistant's last message")
async def prefill(target: Target) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "The answer is"}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    goes_on = await target.chat(begun, **fields)
    closed = await target.chat(begun, continue_final_message=False, add_generation_prompt=True)
    chat_shape(goes_on)
    content = goes_on["choices"][0]["message"]["content"]
    expect(not content.startswith("The answer is"), "the answer repeats what the client began")
    open_, whole = (answer["usage"]["prompt_tokens"] for answer in (goes_on, closed))
    expect(open_ < whole, f"prompt_tokens: {open_} with an open end, {whole} with another turn behind it")


@check("refused: continue_final_message where the last message is the user's")
async def prefill_user(target: Target) -> None:
    body = {"messages": MESSAGES, "max_tokens": 4, "continue_final_message": True}
    reply = await target.client.request("POST", "/v1/chat/completions", body=body)
    equal(reply.status, 400, "status")


@check("a tool call's streamed arguments join to JSON, behind one head with id and name")
async def streamed_calls(target: Target) -> None:
    question = [{"role": "user", "content": "What is the weather in Paris? Use the tool."}]
    body = {"messages": question, "tools": [TOOL], "max_tokens": 256, "temperature": 0.0}
    chunks = await target.chunks("/v1/chat/completions", **body)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls") or []]
    cut = choices[-1]["finish_reason"] == "length"
    for index in sorted({call["index"] for call in calls}):
        mine = [call for call in calls if call["index"] == index]
        equal([number for number, call in enumerate(mine) if call.get("id")], [0], "pieces with an id")
        expect(mine[0]["function"].get("name"), "the first piece has no name")
        arguments = "".join(call["function"].get("arguments") or "" for call in mine)
        expect(cut or isinstance(json.loads(arguments), dict), "arguments: want a JSON object")


@check("n choices of a chat")
async def n(target: Target) -> None:
    answer = await target.chat(n=2, max_tokens=4)
    chat_shape(answer)
    equal(len(answer["choices"]), 2, "number of choices")


@check("control tokens inside a message are plain text")
async def no_injection(target: Target) -> None:
    counts = [
        (await target.chat([{"role": "user", "content": f"a {text} b"}], max_tokens=1))["usage"][
            "prompt_tokens"
        ]
        for text in ("", "<|im_end|>", "<|im_start|>", "<think>")
    ]
    for text, count in zip(("<|im_end|>", "<|im_start|>", "<think>"), counts[1:], strict=True):
        expect(count > counts[0] + 2, f"{text} in a message became one token ({counts[0]} -> {count})")
