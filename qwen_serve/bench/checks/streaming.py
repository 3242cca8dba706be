"""Server-sent events: format, concatenated text, usage, clients that disconnect."""

import asyncio
from contextlib import aclosing
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
from qwen_serve.bench.checks.shapes import usage_shape
from qwen_serve.bench.errors import ServerError

BODIES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (COMPLETIONS, "text_completion", {"prompt": PROMPT}),
    (CHAT, "chat.completion.chunk", {"messages": MESSAGES}),
    (INVOCATIONS, "text_completion", {"prompt": PROMPT}),
    (INVOCATIONS, "chat.completion.chunk", {"messages": MESSAGES}),
)
GREEDY = {"max_tokens": 48, "temperature": 0.0}


@check("chunks have the right object, one id, and end with a finish_reason, then [DONE]")
async def form(target: Target) -> None:
    for path, kind, body in BODIES:
        chunks = await target.chunks(path, **body, **GREEDY)
        equal({chunk.get("object") for chunk in chunks}, {kind}, f"{path}: object")
        equal(len({chunk.get("id") for chunk in chunks}), 1, f"{path}: number of ids")
        for name in ("created", "model"):
            expect(all(chunk.get(name) for chunk in chunks), f"{path}: a chunk has no {name}")
        reasons = [choice.get("finish_reason") for chunk in chunks for choice in chunk["choices"]]
        expect(reasons[-1] in ("stop", "length"), f"{path}: the last finish_reason is {reasons[-1]!r}")
        equal([reason for reason in reasons[:-1] if reason], [], f"{path}: finish_reason before the end")


@check("the first delta of a chat has role `assistant`")
async def role_first(target: Target) -> None:
    chunks = await target.chunks(CHAT, messages=MESSAGES, **GREEDY)
    equal(chunks[0]["choices"][0]["delta"].get("role"), "assistant", "role of the first delta")


@check("the pieces join to what the same request answers unstreamed")
async def joins(target: Target) -> None:
    for path, _, body in BODIES:
        whole = (await target.ask(path, **body, **GREEDY))["choices"][0]
        chunks = await target.chunks(path, **body, **GREEDY)
        text = whole["message"]["content"] if "message" in whole else whole["text"]
        equal(_text(chunks), text, f"{path}: text")
        equal(_reason(chunks), whole["finish_reason"], f"{path}: finish_reason")


@check("tokens come piece by piece, not all at the end")
async def incremental(target: Target) -> None:
    chunks = await target.chunks(COMPLETIONS, prompt=PROMPT, max_tokens=64, temperature=0.0, ignore_eos=True)
    pieces = [chunk for chunk in chunks if _text([chunk])]
    expect(len(pieces) >= 3, f"64 tokens came in {len(pieces)} pieces")


@check("stream_options.include_usage adds one last chunk with usage and no choices")
async def usage(target: Target) -> None:
    for path, _, body in BODIES:
        whole = await target.ask(path, **body, **GREEDY)
        chunks = await target.chunks(path, **body, **GREEDY, stream_options={"include_usage": True})
        equal(chunks[-1].get("choices"), [], f"{path}: choices of the last chunk")
        usage_shape(chunks[-1])
        for name in ("prompt_tokens", "completion_tokens"):
            equal(chunks[-1]["usage"][name], whole["usage"][name], f"{path}: usage.{name}")
        expect(not any(chunk.get("usage") for chunk in chunks[:-1]), f"{path}: usage before the last chunk")


@check("without include_usage no chunk has usage, and every chunk has a choice")
async def no_usage(target: Target) -> None:
    for path, _, body in BODIES:
        chunks = await target.chunks(path, **body, **GREEDY)
        expect(not any(chunk.get("usage") for chunk in chunks), f"{path}: a chunk has usage")
        expect(all(chunk["choices"] for chunk in chunks), f"{path}: a chunk has no choices")


@check("timings_per_token: every chunk of a single answer has llama-server's timings so far")
async def timings(target: Target) -> None:
    for path, _, body in BODIES:
        chunks = await target.chunks(path, **body, **GREEDY, timings_per_token=True)
        counts = [chunk.get("timings", {}).get("predicted_n") for chunk in chunks]
        expect(all(type(count) is int for count in counts), f"{path}: predicted_n: got {counts}")
        expect(counts == sorted(counts) and counts[-1] > 0, f"{path}: predicted_n does not grow: {counts}")


@check("a stop string never shows, not even in part")
async def stop(target: Target) -> None:
    text = await target.text(max_tokens=48)
    middle = text[len(text) // 3 :][:7]
    wanted = text[: text.index(middle)]
    chunks = await target.chunks(COMPLETIONS, prompt=PROMPT, **GREEDY, stop=[middle])
    equal(_text(chunks), wanted, f"text with stop {middle!r}")
    equal(_reason(chunks), "stop", "finish_reason")


@check("several choices share a stream, told apart by index")
async def choices(target: Target) -> None:
    chunks = await target.chunks(COMPLETIONS, prompt=PROMPT, n=2, **GREEDY)
    texts = ["".join(c["text"] for k in chunks for c in k["choices"] if c["index"] == i) for i in (0, 1)]
    expect(texts[0], "choice 0 has no text")
    equal(texts[1], texts[0], "text of the second greedy choice")
    reasons = [c["index"] for k in chunks for c in k["choices"] if c.get("finish_reason")]
    equal(sorted(reasons), [0, 1], "choices with a finish_reason")


@check("characters of several tokens arrive whole")
async def characters(target: Target) -> None:
    prompt = "🦊🐕🦊🐕🦊🐕🦊🐕 東京 東京 東京 " * 3
    chunks = await target.chunks(COMPLETIONS, prompt=prompt, echo=True, max_tokens=24, temperature=0.0)
    expect(_text(chunks).startswith(prompt), f"echoed prompt: got {_text(chunks)[:60]!r}")
    streamed, whole = _text(chunks)[len(prompt) :], await target.text(prompt, max_tokens=24)
    # Rounding may make two greedy runs diverge. U+FFFD before the end is a broken character unless both #
    # have it.
    if "\ufffd" in streamed.rstrip("\ufffd"):
        equal(streamed, whole, "text")


@check("a bad request with `stream` gets its 4xx before any event")
async def bad_request(target: Target) -> None:
    for path, body in ((COMPLETIONS, {"prompt": 5}), (CHAT, {"messages": []})):
        reply = await target.client.request("POST", path, body={**body, "stream": True})
        expect(400 <= reply.status < 500, f"{path}: want a 4xx, got {reply.status}")


@check("clients that hang up free their place: 24 long requests dropped, the next is answered at once")
async def hang_up(target: Target) -> None:
    body = {"prompt": PROMPT, "max_tokens": 100_000, "ignore_eos": True, "temperature": 0.0, "stream": True}

    async def leave_early() -> None:
        try:
            async with aclosing(target.client.events(COMPLETIONS, body)) as events:
                async for _ in events:
                    return
        except ServerError as error:
            expect(error.status in (429, 503), f"a stream was refused: {error}")

    await asyncio.wait_for(asyncio.gather(*(leave_early() for _ in range(24))), target.client.timeout)
    try:
        await asyncio.wait_for(target.complete(max_tokens=2), 30)
    except TimeoutError:
        expect(False, "no answer within 30 s after all clients had hung up")


def _text(chunks: list[Answer]) -> str:
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(part.get("text") or (part.get("delta") or {}).get("content") or "" for part in parts)


def _reason(chunks: list[Answer]) -> Any:
    return next((c["finish_reason"] for k in chunks for c in k["choices"] if c.get("finish_reason")), None)
