"""One conversation in the wire shape of each API format, and each format's answer in one shape."""

import json
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.server.api.conftest import Server

FORMATS = ("chat", "responses", "messages", "ollama")
PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "ollama": "/api/chat",
}


@dataclass
class Answer:
    """What a client gets."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    """Names and arguments; of a cut call the text of its arguments."""
    ended: str = ""
    """"stop", "length" or "calls"."""
    raw: Any = None
    """The assistant's turn as the client sends it back."""


def tools_of(form: str, functions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Functions (name, parameters) as a format's tools."""
    if form == "responses":
        return [{"type": "function", **function} for function in functions]
    if form == "messages":
        return [{"name": one["name"], "input_schema": one["parameters"]} for one in functions]
    return [{"type": "function", "function": function} for function in functions]


def body_of(
    form: str,
    messages: list[Any],
    *,
    functions: list[dict[str, Any]] | None = None,
    thinking: bool = False,
    stop: list[str] | None = None,
    limit: int = 900,
    stream: bool = False,
) -> dict[str, Any]:
    """A request's body; the messages are in the format's own shape."""
    tools = {"tools": tools_of(form, functions)} if functions else {}
    body: dict[str, Any] = {"model": "q", "stream": stream, **tools}
    match form:
        case "responses":
            effort = {"reasoning": {"effort": "max" if thinking else "none"}}
            return {
                **body,
                "input": messages,
                "max_output_tokens": limit,
                **effort,
                **({"stop": stop} if stop else {}),
            }
        case "messages":
            more = {"thinking": {"type": "adaptive"}} if thinking else {}
            return {
                **body,
                "messages": messages,
                "max_tokens": limit,
                **more,
                **({"stop_sequences": stop} if stop else {}),
            }
        case "ollama":
            options = {"num_predict": limit, **({"stop": stop} if stop else {})}
            return {**body, "messages": messages, "think": thinking, "options": options}
    return {
        **body,
        "messages": messages,
        "max_tokens": limit,
        "enable_thinking": thinking,
        **({"stop": stop} if stop else {}),
    }


def ask(server: Server, form: str, messages: list[Any], **options: Any) -> Answer:
    """The answer to a conversation."""
    body = body_of(form, messages, **options)
    response = server.http.post(PATHS[form], json=body)
    assert response.status_code == 200, response.text
    return answer_of(form, response, stream=body["stream"])


def answer_of(form: str, response: httpx.Response, *, stream: bool) -> Answer:
    """What a response says."""
    text = response.text if stream else ""
    if form == "ollama":
        return _ollama([json.loads(line) for line in text.splitlines()] if text else [response.json()])
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    if form == "chat":
        return _chat(_joined(events) if text else response.json()["choices"][0])
    if form == "responses":
        return _responses(events[-1]["response"] if text else response.json())
    return _messages(_blocks(events) if text else response.json())


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _joined(chunks: list[Any]) -> Any:
    """A stream's choice."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    reason = None
    for chunk in chunks:
        for choice in chunk["choices"]:
            for key, value in choice["delta"].items():
                if key == "tool_calls":
                    calls = message.setdefault(key, [])
                    for call in value:
                        if call["index"] == len(calls):
                            calls.append({key: one for key, one in call.items() if key != "index"})
                        else:
                            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
                elif key != "role" and value:
                    message[key] = (message.get(key) or "") + value
            reason = choice["finish_reason"] or reason
    return {"message": message, "finish_reason": reason}


def _chat(choice: Any) -> Answer:
    message = choice["message"]
    calls = [
        (one["function"]["name"], _json(one["function"]["arguments"]))
        for one in message.get("tool_calls", [])
    ]
    ended = {"tool_calls": "calls"}.get(choice["finish_reason"], choice["finish_reason"])
    return Answer(message.get("reasoning_content", ""), message["content"] or "", calls, ended, [message])


def _responses(response: Any) -> Answer:
    answer = Answer(raw=response["output"])
    for item in response["output"]:
        match item["type"]:
            case "reasoning":
                answer.reasoning += item["content"][0]["text"]
            case "message":
                answer.content += item["content"][0]["text"]
            case "function_call":
                answer.calls.append((item["name"], _json(item["arguments"])))
    whole = response["status"] == "completed"
    assert all(item["status"] == "completed" for item in response["output"]) or not whole
    answer.ended = "length" if not whole else "calls" if answer.calls else "stop"
    return answer


def _blocks(events: list[Any]) -> Any:
    blocks: list[Any] = []
    reason, pieces = None, ""
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
            pieces = ""
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[-1]
            for key in ("text", "thinking", "signature"):
                block[key] = block.get(key, "") + delta[key] if key in delta else block.get(key)
            pieces += delta.get("partial_json", "")
        elif event["type"] == "content_block_stop" and blocks[-1]["type"] == "tool_use":
            blocks[-1]["input"] = _json(pieces or "{}")
        elif event["type"] == "message_delta":
            reason = event["delta"]["stop_reason"]
    made = [{key: value for key, value in block.items() if value is not None} for block in blocks]
    return {"content": made, "stop_reason": reason}


def _messages(message: Any) -> Answer:
    answer = Answer(raw=[{"role": "assistant", "content": message["content"]}])
    for block in message["content"]:
        answer.reasoning += block.get("thinking", "")
        answer.content += block.get("text", "")
        answer.calls += [(block["name"], block["input"])] if block["type"] == "tool_use" else []
    named = {"tool_use": "calls", "max_tokens": "length"}
    answer.ended = named.get(message["stop_reason"], "stop")
    return answer


def _ollama(lines: list[Any]) -> Answer:
    answer = Answer()
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for line in lines:
        one = line["message"]
        answer.reasoning += one.get("thinking", "")
        answer.content += one["content"]
        calls = one.get("tool_calls", [])
        answer.calls += [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        if calls:
            message["tool_calls"] = [*message.get("tool_calls", []), *calls]
    reason = lines[-1]["done_reason"]
    answer.ended = "calls" if answer.calls and reason == "stop" else reason
    answer.raw = [{**message, "content": answer.content, "thinking": answer.reasoning}]
    return answer


def results_of(form: str, answer: Answer) -> list[dict[str, Any]]:
    """The results of the answer's calls, as a client sends them."""
    if form == "responses":
        ids = [item["call_id"] for item in answer.raw if item["type"] == "function_call"]
        return [{"type": "function_call_output", "call_id": id_, "output": "done"} for id_ in ids]
    if form == "messages":
        used = [block["id"] for block in answer.raw[0]["content"] if block["type"] == "tool_use"]
        blocks = [{"type": "tool_result", "tool_use_id": id_, "content": "done"} for id_ in used]
        return [{"role": "user", "content": blocks}] if blocks else []
    calls = answer.raw[0].get("tool_calls", [])
    return [{"role": "tool", "tool_call_id": one["id"], "content": "done"} for one in calls]
