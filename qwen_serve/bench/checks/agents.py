"""What agents depend on: their histories are taken back, and what is not an answer's text is left alone."""

from typing import Any

from qwen_serve.bench.checks.base import CHAT, MESSAGES, SkippedError, Target, check, expect
from qwen_serve.bench.checks.base import expect_equal as equal

ARGUMENTS = ('{"value": ', '{"value": "cut of', "[1]", "no JSON", "{'value': True}", "")
"""A call's arguments as a limit or a model leaves them."""

WRITE: dict[str, Any] = {
    "name": "write",
    "parameters": {"type": "object", "properties": {"value": {"type": "string"}}, "required": ["value"]},
}
SYSTEM = {"role": "system", "content": "You greet."}


@check("a history whose call has broken arguments is answered: chat")
async def chat_history(target: Target) -> None:
    for arguments in ARGUMENTS:
        call = {"id": "c", "type": "function", "function": {"name": "write", "arguments": arguments}}
        turn = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "c", "content": "error: broken arguments"}
        tools = [{"type": "function", "function": WRITE}]
        await target.chat([*MESSAGES, turn, result], tools=tools, max_tokens=2)


@check("a history whose call has broken arguments is answered: Responses")
async def responses_history(target: Target) -> None:
    await target.needs("POST", "/v1/responses")
    for arguments in ARGUMENTS:
        call = {"type": "function_call", "call_id": "c", "name": "write", "arguments": arguments}
        result = {"type": "function_call_output", "call_id": "c", "output": "error: broken arguments"}
        tools = [{"type": "function", **WRITE}]
        body: dict[str, Any] = {"input": [*MESSAGES, call, result], "tools": tools, "max_output_tokens": 16}
        await target.ask("/v1/responses", model="any", **body)


@check("a history with documents, search results and tools of Anthropic's own is answered: Messages")
async def messages_history(target: Target) -> None:
    await target.needs("POST", "/v1/messages")
    source = {"type": "text", "media_type": "text/plain", "data": "The code is 17."}
    found = {"type": "search_result", "source": "x", "title": "T", "content": [{"type": "text", "text": "S"}]}
    used = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}}
    hits = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    messages = [
        {"role": "user", "content": [{"type": "document", "source": source}, found]},
        {"role": "assistant", "content": [used, hits, {"type": "text", "text": "So."}]},
        *MESSAGES,
    ]
    await target.ask("/v1/messages", model="any", max_tokens=2, messages=messages)


@check("a conversation without a user's message is answered")
async def no_question(target: Target) -> None:
    await target.chat([SYSTEM], max_tokens=2)
    await target.chat([SYSTEM, {"role": "assistant", "content": "Hello, how"}], max_tokens=2)


@check("a beginning that closes its think block is continued with the answer")
async def closed_block(target: Target) -> None:
    begun = {"role": "assistant", "content": "<think>\nIt is 4. I answer.\n</think>"}
    message = (await target.chat([*MESSAGES, begun], thinking=True))["choices"][0]["message"]
    expect(message.get("content"), "there is no content")
    expect(not message.get("reasoning_content"), "there is reasoning_content")


@check("a stop string acts on the answer, not on the reasoning before it")
async def stop_strings(target: Target) -> None:
    fields: dict[str, Any] = {"thinking": True, "max_tokens": target.thinking_tokens}
    message = (await target.chat(**fields))["choices"][0]["message"]
    reasoning, content = (message.get(name) or "" for name in ("reasoning_content", "content"))
    word = next((one for one in reasoning.split() if one not in content), None)
    if word is None or not content:
        raise SkippedError("the reasoning has no word that the answer does not have")
    stopped = (await target.chat(**fields, stop=[word]))["choices"][0]["message"]
    equal(stopped.get("content"), content, f"content with the stop string {word!r} of the reasoning")


@check("a schema that cannot be enforced does not keep other tools from being called")
async def unenforced(target: Target) -> None:
    looks = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?!x).*$"}}}
    tools = [
        {"type": "function", "function": {"name": "looks", "parameters": looks}},
        {"type": "function", "function": WRITE},
    ]
    named = {"type": "function", "function": {"name": "write"}}
    for choice in ("required", named):
        await target.chat(tools=tools, tool_choice=choice, max_tokens=8)


@check("values that many clients send are taken: max_tokens -1, top_p 0, verbosity")
async def values(target: Target) -> None:
    plain = (await target.ask(CHAT, messages=MESSAGES, temperature=0.0))["choices"][0]["message"]
    fields: dict[str, Any] = {"max_tokens": -1, "top_p": 0, "verbosity": "low", "temperature": 1.0}
    drawn = (await target.ask(CHAT, messages=MESSAGES, **fields))["choices"][0]["message"]
    equal(drawn["content"], plain["content"], "content at top_p 0, beside that at temperature 0")


@check("what the server does not offer is not asked for again by OpenAI's and Anthropic's packages")
async def not_offered(target: Target) -> None:
    reply = await target.client.request("POST", "/v1/embeddings", body={"input": "x"})
    if reply.status != 501:
        raise SkippedError("the server offers embeddings, or does not know them")
    equal(reply.headers.get("x-should-retry"), "false", "x-should-retry")
