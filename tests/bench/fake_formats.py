"""Anthropic's Messages and OpenAI's Responses, for the fake server: requests as chats, answers as theirs."""

import re
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from tests.bench.fake_validation import BadRequest

Body = dict[str, Any]


def chat_of_message(body: Body) -> Body:
    """The chat that a Messages request asks for."""
    if "max_tokens" not in body:
        raise BadRequest("max_tokens: needed", "max_tokens")
    system = body.get("system", "")
    blocks = [{"text": system}] if isinstance(system, str) else system
    text = re.sub(r"cch=\w+", "cch=0", "\n".join(block["text"] for block in blocks))
    messages = [{"role": "system", "content": text}] if text else []
    for message in body.get("messages") or []:
        content = message["content"]
        texts = list(map(_text_of, content)) if isinstance(content, list) else [content]
        messages.append({"role": message["role"], "content": "".join(texts)})
    same = ("model", "max_tokens", "temperature", "stream", "tools")
    thinks = (body.get("thinking") or {}).get("type") == "enabled"
    chat = {name: body[name] for name in same if name in body}
    return {**chat, "messages": messages, "thinking": thinks, "stop": body.get("stop_sequences", [])}


def message_of(answer: Body, stopped_by: str | None) -> Body:
    """A chat's answer as a message."""
    [choice] = answer["choices"]
    content = []
    if thought := choice["message"].get("reasoning_content"):
        content.append({"type": "thinking", "thinking": thought, "signature": "s"})
    content.append({"type": "text", "text": choice["message"]["content"]})
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    reason = {"stop": "end_turn", "length": "max_tokens"}[choice["finish_reason"]]
    return {
        "id": f"msg_{uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": answer["model"],
        "content": content,
        "stop_reason": reason if stopped_by is None else "stop_sequence",
        "stop_sequence": stopped_by,
        "usage": {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        },
    }


def message_events(message: Body) -> Iterator[Body]:
    """A message as events."""
    yield {"type": "message_start", "message": {**message, "content": []}}
    yield {"type": "ping"}
    for index, block in enumerate(message["content"]):
        field = "text" if block["type"] == "text" else "thinking"
        yield {"type": "content_block_start", "index": index, "content_block": {**block, field: ""}}
        for word in re.findall(r"\S*\s*", block[field]):
            delta = {"type": f"{field}_delta", field: word}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ending = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": ending, "usage": message["usage"]}
    yield {"type": "message_stop"}


def chat_of_response(body: Body) -> Body:
    """The chat that a Responses request asks for."""
    if "previous_response_id" in body:
        raise BadRequest("previous_response_id: nothing is kept", "previous_response_id")
    if "max_tokens" in body:
        raise BadRequest("max_tokens: max_output_tokens is its name", "max_tokens")
    if body.get("tool_choice") == "required" and all(
        tool["type"] != "function" for tool in body.get("tools", [])
    ):
        raise BadRequest("tool_choice: asks for a call, but no tool is a function", "tool_choice")
    given = body.get("input")
    if given is None:
        raise BadRequest("input: needed", "input")
    items: list[dict[str, Any]] = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages = [{"role": "system", "content": body["instructions"]}] if "instructions" in body else []
    for item in items:
        content: Any = item.get("content", item.get("arguments", item.get("output")))
        texts = list(map(_text_of, content)) if isinstance(content, list) else [content]
        messages.append({"role": item.get("role", "assistant"), "content": "".join(texts)})
    same = ("model", "temperature", "stream", "tools")
    chat = {name: body[name] for name in same if name in body}
    if "max_output_tokens" in body:
        chat["max_tokens"] = body["max_output_tokens"]
    if "message.output_text.logprobs" in body.get("include", []):
        chat |= {"logprobs": True, "top_logprobs": body.get("top_logprobs", 0)}
    return {
        **chat,
        "messages": messages,
        "reasoning_effort": (body.get("reasoning") or {}).get("effort", "none"),
    }


def response_of(answer: Body) -> Body:
    """A chat's answer as a response."""
    [choice] = answer["choices"]
    output: list[Body] = []
    thought = choice["message"].get("reasoning_content", "")
    if thought:
        part = {"type": "reasoning_text", "text": thought}
        output.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": [part]})
    told = (choice.get("logprobs") or {}).get("content", [])
    text = choice["message"]["content"]
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": told}
    output.append({"type": "message", "id": "msg_1", "role": "assistant", "content": [part]})
    usage = answer["usage"]
    whole = choice["finish_reason"] == "stop"
    return {
        "id": f"resp_{uuid4().hex}",
        "object": "response",
        "model": answer["model"],
        "status": "completed" if whole else "incomplete",
        "incomplete_details": None if whole else {"reason": "max_output_tokens"},
        "output": output,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": len(thought.split())},
            "total_tokens": usage["total_tokens"],
        },
    }


def response_events(response: Body) -> Iterator[Body]:
    """A response as events, without their numbers."""
    for kind in ("created", "in_progress"):
        yield {"type": f"response.{kind}", "response": {**response, "output": []}}
    for index, item in enumerate(response["output"]):
        stream = "reasoning_text" if item["type"] == "reasoning" else "output_text"
        [part] = item["content"]
        yield {"type": "response.output_item.added", "output_index": index, "item": {**item, "content": []}}
        yield {"type": "response.content_part.added", "output_index": index, "part": {**part, "text": ""}}
        for word in re.findall(r"\S*\s*", part["text"]):
            yield {"type": f"response.{stream}.delta", "output_index": index, "delta": word}
        yield {"type": f"response.{stream}.done", "output_index": index, "text": part["text"]}
        yield {"type": "response.content_part.done", "output_index": index, "part": part}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}


def _text_of(block: Body) -> str:
    kind = block.get("type", "text")
    if kind == "image":
        raise BadRequest("messages: an image is not read", "messages")
    if kind == "tool_use":
        return str(block["input"])
    return str(block.get("text") or block.get("thinking") or block.get("content") or "")
