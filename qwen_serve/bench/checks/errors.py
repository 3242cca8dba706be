"""Bad input gets a 4xx with OpenAI's error object, never a 5xx or a hang. Each row of the tables is a
rule."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from qwen_serve.bench.checks.base import (
    CHAT,
    CHECKS,
    COMPLETIONS,
    INVOCATIONS,
    MESSAGES,
    PROMPT,
    Check,
    Target,
    check,
    expect,
)
from qwen_serve.bench.errors import UnreachableError
from qwen_serve.bench.load.client import Reply, clip
from qwen_serve.bench.load.protocol import FILLER

SECONDS = 60
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@dataclass(frozen=True, slots=True)
class Row:
    """A bad value of a field, which the error must name. ``on``: the kind of request that gets it."""

    name: str
    field: str
    value: Any
    on: str = "any"  # "prompt", "messages" or "any"


MISSING = object()
ROWS = (
    Row("schema_not", "guided_json", {"not": {}}),
    Row("regex_open", "guided_regex", "("),
    Row("choice_empty", "guided_choice", []),
    Row("grammar_open", "grammar", "root ::= ("),
    Row("response_format_xml", "response_format", {"type": "xml"}),
    Row("tool_choice_alone", "tool_choice", "required", "messages"),
    Row("thinking_budget_negative", "thinking_budget", -2, "messages"),
    Row("thinking_budget_of_a_completion", "thinking_budget", 5, "prompt"),
    Row("reasoning_effort_unknown", "reasoning", {"effort": "a bit"}, "messages"),
    Row("prompt_missing", "prompt", MISSING, "prompt"),
    Row("prompt_null", "prompt", None, "prompt"),
    Row("prompt_number", "prompt", 5, "prompt"),
    Row("prompt_object", "prompt", {"text": "Hello"}, "prompt"),
    Row("prompt_empty_list", "prompt", [], "prompt"),
    Row("prompt_mixed_list", "prompt", ["Hello", 5], "prompt"),
    Row("prompt_list_of_null", "prompt", [None], "prompt"),
    Row("prompt_id_negative", "prompt", [1, -1], "prompt"),
    Row("prompt_id_too_large", "prompt", [1, 10**9], "prompt"),
    Row("prompt_id_huge", "prompt", [2**80], "prompt"),
    Row("prompt_ids_fractional", "prompt", [1.5], "prompt"),
    Row("messages_missing", "messages", MISSING, "messages"),
    Row("messages_null", "messages", None, "messages"),
    Row("messages_empty", "messages", [], "messages"),
    Row("messages_string", "messages", "Hello", "messages"),
    Row("message_string", "messages", ["Hello"], "messages"),
    Row("role_unknown", "role", [{"role": "wizard", "content": "Hello"}], "messages"),
    Row("role_missing", "role", [{"content": "Hello"}], "messages"),
    Row("role_number", "role", [{"role": 5, "content": "Hello"}], "messages"),
    Row("content_missing", "content", [{"role": "user"}], "messages"),
    Row("content_number", "content", [{"role": "user", "content": 5}], "messages"),
    Row("content_part_unknown", "content", [{"role": "user", "content": [IMAGE]}], "messages"),
    Row("max_tokens_zero", "max_tokens", 0),
    Row("max_tokens_negative", "max_tokens", -2),
    Row("max_tokens_fraction", "max_tokens", 1.5),
    Row("max_tokens_string", "max_tokens", "ten"),
    Row("max_tokens_boolean", "max_tokens", True),
    Row("max_completion_tokens_zero", "max_completion_tokens", 0, "messages"),
    Row("temperature_negative", "temperature", -0.5),
    Row("temperature_string", "temperature", "hot"),
    Row("top_p_above_one", "top_p", 1.5),
    Row("top_p_negative", "top_p", -0.1),
    Row("top_k_fraction", "top_k", 1.5),
    Row("min_p_negative", "min_p", -0.5),
    Row("min_p_above_one", "min_p", 1.5),
    Row("presence_penalty_string", "presence_penalty", "high"),
    Row("frequency_penalty_list", "frequency_penalty", [1]),
    Row("repetition_penalty_negative", "repetition_penalty", -1.0),
    Row("seed_string", "seed", "lucky"),
    Row("stop_number", "stop", 5),
    Row("stop_list_of_numbers", "stop", [5]),
    Row("stream_string", "stream", "perhaps"),
    Row("ignore_eos_string", "ignore_eos", "perhaps"),
    Row("n_zero", "n", 0),
    Row("n_string", "n", "two"),
    Row("stream_options_string", "stream_options", "usage"),
    Row("top_logprobs_alone", "top_logprobs", 2),
    Row("logprobs_many", "logprobs", 21),
    Row("prompt_logprobs_many", "prompt_logprobs", 21),
    Row("logit_bias_string", "logit_bias", "strong"),
    Row("allowed_token_ids_strings", "allowed_token_ids", ["a"]),
    Row("stop_token_ids_number", "stop_token_ids", 5),
    Row("bad_words_numbers", "bad_words", [5]),
    Row("min_tokens_negative", "min_tokens", -1),
    Row("n_predict_string", "n_predict", "ten"),
    Row("best_of_more", "best_of", 2),
    Row("priority_string", "priority", "first"),
    Row("priority_fraction", "priority", 0.5),
    Row("service_tier_unknown", "service_tier", "gold"),
)

JSON = "application/json"
# name, description, raw body, content type
RAW: tuple[tuple[str, str, bytes, str], ...] = (
    ("json_broken", "broken JSON", b'{"prompt": "Hello"', JSON),
    ("json_empty", "an empty body", b"", JSON),
    ("json_array", "a JSON array", b"[]", JSON),
    ("json_null", "a JSON null", b"null", JSON),
    ("json_string", "a JSON string", b'"Hello"', JSON),
    (
        "json_nan",
        "a NaN, which is not JSON",
        b'{"prompt": "Hello", "messages": [], "temperature": NaN}',
        JSON,
    ),
    ("json_trailing", "text behind the JSON", b'{"prompt": "Hello"} trailing', JSON),
    ("json_infinity", "an Infinity, which is not JSON", b'{"prompt": "Hello", "top_p": Infinity}', JSON),
    ("json_bare", "a word", b"hello", JSON),
    ("json_deep", "JSON nested 100,000 deep", b"[" * 100_000, JSON),
    ("json_not_utf8", "bytes that are not UTF-8", b'{"prompt": "\xff\xfe"}', JSON),
    ("content_type_text", "another content type", b'{"prompt": "Hello", "max_tokens": 1}', "text/plain"),
)
BASES: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "prompt": ((COMPLETIONS, {"prompt": PROMPT}), (INVOCATIONS, {"prompt": PROMPT})),
    "messages": ((CHAT, {"messages": MESSAGES}), (INVOCATIONS, {"messages": MESSAGES})),
}
BASES["any"] = BASES["prompt"] + BASES["messages"]


def expect_refusal(reply: Reply, where: str, field: str | None = None) -> None:
    """Raises FailedError unless the reply is a 4xx with a complete error object that names ``field`` in
    `param` or in the message."""
    expect(400 <= reply.status < 500, f"{where}: want a 4xx, got {reply.status}: {clip(reply.text, 120)}")
    error = reply.json().get("error")
    expect(isinstance(error, dict), f"{where}: want an error object, got {clip(reply.text, 120)}")
    for name in ("message", "type", "param", "code"):
        expect(name in error, f"{where}: error.{name} is missing")
    message = error["message"]
    expect(isinstance(message, str) and message, f"{where}: error.message: want a sentence, got {message!r}")
    if field is not None:
        named = field in str(error["param"]) or field in message
        expect(named, f"{where}: the error does not name {field!r}: {clip(message, 120)}")


async def _post(target: Target, path: str, **sent: Any) -> Reply:
    return await asyncio.wait_for(target.client.request("POST", path, **sent), SECONDS)


def bad_field(row: Row) -> Callable[[Target], Awaitable[None]]:
    """A check that sends valid requests with the row's value in them."""
    key = "messages" if row.on == "messages" and row.field in ("role", "content") else row.field

    async def run(target: Target) -> None:
        for path, base in BASES[row.on]:
            if path == INVOCATIONS and row.value in (MISSING, None):
                continue  # `request_empty` covers this case: the error may name either field
            body = {"max_tokens": 4, **base, key: row.value}
            if row.value is MISSING:
                del body[key]
            expect_refusal(await _post(target, path, body=body), path, row.field)

    return run


def bad_body(data: bytes, kind: str) -> Callable[[Target], Awaitable[None]]:
    """A check that sends these bytes to all three endpoints."""

    async def run(target: Target) -> None:
        for path in (COMPLETIONS, CHAT, INVOCATIONS):
            expect_refusal(await _post(target, path, data=data, headers={"Content-Type": kind}), path)

    return run


def _what(row: Row) -> str:
    shown = "left out" if row.value is MISSING else clip(json.dumps(row.value), 50)
    return f"refused: {row.field} {shown}"


CHECKS += [Check(f"errors.{row.name}", _what(row), bad_field(row)) for row in ROWS]
CHECKS += [
    Check(f"errors.{name}", f"refused: {what}", bad_body(data, kind)) for name, what, data, kind in RAW
]


@check("refused: neither prompt nor messages on /invocations")
async def request_empty(target: Target) -> None:
    reply = await target.client.request("POST", INVOCATIONS, body={"max_tokens": 4})
    expect_refusal(reply, INVOCATIONS)


@check("refused: a prompt longer than the context")
async def prompt_too_long(target: Target) -> None:
    text = FILLER * ((target.context or 600_000) // 10 + 100)
    for path, body in (
        (COMPLETIONS, {"prompt": text}),
        (INVOCATIONS, {"prompt": text}),
        (CHAT, {"messages": [{"role": "user", "content": text}]}),
    ):
        expect_refusal(await _post(target, path, body={**body, "max_tokens": 4}), path)


@check("refused: an oversized body")
async def body_oversized(target: Target) -> None:
    data = b'{"max_tokens": 4, "prompt": "' + b"a " * (target.oversized_bytes // 2) + b'"}'
    for path in (COMPLETIONS, CHAT, INVOCATIONS):
        try:
            reply = await _post(target, path, data=data, headers={"Content-Type": JSON})
        except UnreachableError as error:
            expect(False, f"{path}: want a 4xx, but the connection broke: {error}")
        else:
            expect_refusal(reply, path)


@check("a lone surrogate in a string is answered or refused, never a 5xx")
async def lone_surrogate(target: Target) -> None:
    body = b'{"prompt": "a \\ud800 b", "max_tokens": 2}'
    reply = await _post(target, COMPLETIONS, data=body, headers={"Content-Type": JSON})
    expect(reply.status < 500, f"got {reply.status}: {clip(reply.text, 120)}")


@check("extreme values are answered or refused, never a 5xx")
async def extreme_values(target: Target) -> None:
    for field, value in (
        ("repetition_penalty", 1e-38),
        ("stop", ["ab" * 2**19]),
        ("model", "m" * 10**6),
        ("seed", 2**63 - 1),
    ):
        for path, base in BASES["any"]:
            body = {"max_tokens": 2, **base, field: value}
            reply = await _post(target, path, body=body)
            expect(reply.status < 500, f"{path}, {field}: got {reply.status}: {clip(reply.text, 120)}")


@check("after all of this the server is still well")
async def still_well(target: Target) -> None:
    reply = await target.client.request("GET", "/ping")
    expect(reply.status == 200, f"/ping answers {reply.status}")
    await target.complete(max_tokens=2)
