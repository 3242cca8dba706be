"""Pictures through every API format: the same picture and text give the same prompt and answer."""

from typing import Any

import httpx
import pytest

from tests.messages import assistant, system, user
from tests.server.seeing import ask, body, encoded, needs_vision, noise, part, post, text, url
from tests.server.serving import Served

pytestmark = needs_vision

N = 16
"""Tokens of an answer."""

ROWS = 128 // 16 * 96 // 16
"""Of `noise`."""


def image(seed: int) -> dict[str, Any]:
    """Anthropic's content block with a picture."""
    source = {"type": "base64", "media_type": "image/png", "data": encoded(noise(seed))}
    return {"type": "image", "source": source}


def input_image(seed: int) -> dict[str, Any]:
    """The Responses API's content part with a picture."""
    return {"type": "input_image", "image_url": url(noise(seed)), "detail": "auto"}


CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CHAT = {
    "messages": [
        user(text("One:"), part(noise(1)), text("and two:"), part(noise(2))),
        assistant("Yes.", tool_calls=[CALL]),
        {"role": "tool", "tool_call_id": "a", "content": [text("Here\nit is:"), part(noise(3))]},
    ]
}
MESSAGES = {
    "messages": [
        user(text("One:"), image(1), text("and two:"), image(2)),
        assistant(text("Yes."), {"type": "tool_use", "id": "a", "name": "look", "input": {}}),
        user(
            {"type": "tool_result", "tool_use_id": "a", "content": [text("Here"), text("it is:"), image(3)]}
        ),
    ]
}
RESPONSES = {
    "input": [
        user(
            {"type": "input_text", "text": "One:"},
            input_image(1),
            {"type": "input_text", "text": "and two:"},
            input_image(2),
        ),
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]},
        {"type": "function_call", "name": "look", "call_id": "a", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "a",
            "output": [
                {"type": "input_text", "text": "Here"},
                {"type": "input_text", "text": "it is:"},
                input_image(3),
            ],
        },
    ]
}


async def test_every_format_says_the_same(seeing: Served) -> None:
    told = await ask(seeing, {**CHAT, "max_tokens": N})
    other = await post(seeing, "/v1/messages", {**MESSAGES, "max_tokens": N})
    third = await post(seeing, "/v1/responses", {**RESPONSES, "max_output_tokens": N})
    answer = told["choices"][0]["message"]["content"]
    assert other["content"][0]["text"] == answer
    assert third["output"][0]["content"][0]["text"] == answer
    tokens = told["usage"]["prompt_tokens"]
    usage = other["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == tokens
    assert third["usage"]["input_tokens"] == tokens
    # the second was asked of the first's prompt, all but the last token of which is kept
    assert usage["cache_read_input_tokens"] > 3 * ROWS


async def test_images_are_counted_apart(seeing: Served) -> None:
    told = await ask(seeing, {**CHAT, "max_tokens": 1})
    assert told["usage"]["prompt_tokens_details"]["image_tokens"] == 3 * ROWS
    third = await post(seeing, "/v1/responses", {**RESPONSES, "max_output_tokens": 1})
    assert third["usage"]["input_tokens_details"]["image_tokens"] == 3 * ROWS
    none = await ask(seeing, body(text("Hello."), max_tokens=1))
    assert "image_tokens" not in none["usage"]["prompt_tokens_details"]


async def test_clients_that_count_are_told_what_is_read(seeing: Served) -> None:
    encoder = seeing.engine.encoder
    assert encoder is not None
    tokens = (await ask(seeing, {**CHAT, "max_tokens": 1}))["usage"]["prompt_tokens"]
    before = encoder.encoded, encoder.cached
    counted = await post(seeing, "/tokenize", CHAT)
    assert counted["count"] == len(counted["tokens"]) == tokens
    assert counted["tokens"].count(seeing.engine.vocab.picture_id) == 3 * ROWS
    rendered = await post(seeing, "/v1/chat/completions/render", CHAT)
    assert rendered["token_ids"] == counted["tokens"]
    assert await post(seeing, "/v1/responses/render", RESPONSES) == rendered
    assert await post(seeing, "/v1/messages/count_tokens", MESSAGES) == {"input_tokens": tokens}
    shown = (await post(seeing, "/apply-template", CHAT))["prompt"]
    assert shown.count("<|vision_start|><|image_pad|><|vision_end|>") == 3
    assert (encoder.encoded, encoder.cached) == before, "they encode nothing"


async def test_a_reminder_leaves_pictures_in_their_place(seeing: Served) -> None:
    """Claude Code's late system messages."""
    request = {"max_tokens": 1, "messages": [user(image(1), text("What is it?")), system("Be brief.")]}
    shown = (await post(seeing, "/v1/messages/count_tokens", request))["input_tokens"]
    assert shown > ROWS
    reminder = "\n\n<system-reminder>\nBe brief.\n</system-reminder>"
    said = [part(noise(1)), text("What is it?"), text(reminder)]
    assert (await post(seeing, "/tokenize", body(*said)))["count"] == shown


ONE = noise(1)
DOORS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "a file of OpenAI's": (
        "/v1/responses",
        {"input": [user({"type": "input_image", "file_id": "file-1"})]},
        "input[0].content[0].file_id",
        "this server keeps no files",
    ),
    "a file of Anthropic's": (
        "/v1/messages",
        {"source": {"type": "file", "file_id": "file_1"}},
        "messages[0].content[0].source.file_id",
        "this server keeps no files",
    ),
    "an address": (
        "/v1/messages",
        {"source": {"type": "url", "url": "https://example.com/a.png"}},
        "messages[0].content[0].source.url",
        "addresses are not fetched",
    ),
    "no base64": (
        "/v1/messages",
        {"source": {"type": "base64", "media_type": "image/png", "data": "a$b!"}},
        "messages[0].content[0].source.data",
        "is not valid base64",
    ),
    "another kind": (
        "/v1/messages",
        {"source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}},
        "messages[0].content[0].source.media_type",
        "must be one of image/jpeg",
    ),
    "an assistant's": (
        "/v1/responses",
        {"input": [assistant(input_image(1))]},
        "input[0].content[0].type",
        "not supported",
    ),
    "a system's": (
        "/v1/responses",
        {"input": [{"role": "developer", "content": [input_image(1)]}, user("x")]},
        "input[0].content[0].image_url",
        "pictures are read of users and tools alone",
    ),
    "too many": (
        "/v1/responses",
        {"input": [{"role": "user", "content": [input_image(1)] * 17}]},
        "input[0].content[16].image_url",
        "is picture 17 of 17; at most 16 are read",
    ),
    "an unknown detail": (
        "/v1/responses",
        {"input": [user({**input_image(1), "detail": "most"})]},
        "input[0].content[0].detail",
        "must be one of auto, high, low",
    ),
    "cut": (
        "/tokenize",
        {"messages": body(part(ONE))["messages"], "truncate_prompt_tokens": 5},
        "truncate_prompt_tokens",
        "is not cut",
    ),
    "corrupt, where it is counted only": (
        "/tokenize",
        {"messages": body({"type": "image_url", "image_url": "data:image/png;base64,aGVsbG8="})["messages"]},
        "messages[0].content[0].image_url.url",
        "is no picture of a known format",
    ),
}


@pytest.mark.parametrize("case", DOORS)
async def test_what_is_refused_is_named(case: str, seeing: Served) -> None:
    path, request, param, message = DOORS[case]
    if "source" in request:
        block = {"type": "image", **request}
        request = {"max_tokens": 1, "messages": [user(block)]}
    error = (await post(seeing, path, request, 400))["error"]
    assert message in error["message"]
    assert param in error["message"]
    if path != "/v1/messages":
        assert error["param"] == param


SIDE = 16
SIZES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "as it is": ({}, {}, 32 * 16),
    "little detail": ({"detail": "low"}, {}, 32 * 16),
    "at most": ({}, {"max_pixels": 100 * SIDE**2}, 14 * 7),
    "at least": ({}, {"min_pixels": 1000 * SIDE**2}, 45 * 23),
    "both, and within": ({}, {"min_pixels": 8 * SIDE**2, "max_pixels": 4096 * SIDE**2}, 32 * 16),
}


@pytest.mark.parametrize("case", SIZES)
async def test_pixels_are_bounded_as_qwens_processors_do_it(case: str, seeing: Served) -> None:
    fields, bounds, rows = SIZES[case]
    shown = part(noise(5, 512, 256), **fields)
    for request in (body(shown, mm_processor_kwargs=bounds), body({**shown, **bounds})):
        told = await ask(seeing, {**request, "max_tokens": 1})
        assert told["usage"]["prompt_tokens_details"]["image_tokens"] == rows
        assert (await post(seeing, "/tokenize", request))["count"] == told["usage"]["prompt_tokens"]


async def test_every_format_bounds_pixels(seeing: Served) -> None:
    bounds = {"mm_processor_kwargs": {"max_pixels": 12 * SIDE**2}}
    told = await ask(seeing, {**CHAT, **bounds, "max_tokens": 1})
    assert told["usage"]["prompt_tokens_details"]["image_tokens"] == 3 * 4 * 3
    count = await post(seeing, "/v1/messages/count_tokens", {**MESSAGES, **bounds})
    assert count == {"input_tokens": told["usage"]["prompt_tokens"]}
    rendered = await post(seeing, "/v1/responses/render", {**RESPONSES, **bounds})
    assert len(rendered["token_ids"]) == told["usage"]["prompt_tokens"]


async def test_little_detail_is_few_tokens(seeing: Served) -> None:
    told = await ask(seeing, body(part(noise(6, 1600, 800), detail="low"), max_tokens=1))
    assert told["usage"]["prompt_tokens_details"]["image_tokens"] == 45 * 22


BOUNDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "another field": ({"size": 5}, "mm_processor_kwargs.size", "mm_processor_kwargs.size"),
    "no number": ({"min_pixels": "x"}, "mm_processor_kwargs.min_pixels", "mm_processor_kwargs.min_pixels"),
    "none": ({"max_pixels": 0}, "greater than or equal to 1", "mm_processor_kwargs.max_pixels"),
    "more than the server": ({"min_pixels": 2**30}, "at most 1,048,576 are read", ""),
    "upside down": ({"min_pixels": 9000, "max_pixels": 8000}, "at most its max_pixels, 8,000", ""),
}


@pytest.mark.parametrize("case", BOUNDS)
async def test_bounds_that_are_none(case: str, seeing: Served) -> None:
    bounds, message, param = BOUNDS[case]
    error = (await ask(seeing, body(part(ONE), mm_processor_kwargs=bounds), 400))["error"]
    assert message in error["message"]
    assert error["param"] == (param or "messages[0].content[0].image_url.url")


async def test_metrics_and_log_tell_of_images(seeing: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    before = await _metrics(seeing)
    await ask(seeing, body(part(noise(77)), text("What is it?"), max_tokens=1))
    await ask(seeing, body(part(noise(77)), text("What?"), max_tokens=1))
    after = await _metrics(seeing)
    gained = {name: after[name] - before[name] for name in after}
    assert gained["qwen_images_encoded_total"] == 1
    assert gained["qwen_images_cached_total"] == 1
    assert gained["qwen_image_prompt_tokens_total"] == 2 * ROWS
    assert after["qwen_images_bytes"] >= 4 * ROWS
    assert f"{ROWS} of images)" in caplog.text


async def _metrics(served: Served) -> dict[str, float]:
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:
        lines = (await http.get("/metrics")).text.splitlines()
    found = (line.rpartition(" ") for line in lines if "image" in line and not line.startswith("#"))
    return {name: float(value) for name, _, value in found}
