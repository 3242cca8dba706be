"""Tokenizing and properties as in vLLM and llama-server; endpoints that are not served."""

import json

from qwen_serve.bench.checks.base import MESSAGES, QUESTION, SkippedError, Target, check, expect
from qwen_serve.bench.checks.base import expect_equal as equal


@check("/tokenize takes vLLM's `prompt` and answers tokens, their count and the context")
async def tokenize_prompt(target: Target) -> None:
    await target.needs("POST", "/tokenize")
    answer = await target.ask("/tokenize", model="any", prompt=QUESTION)
    equal(answer["count"], len(answer["tokens"]), "count")
    if target.context is not None:
        equal(answer["max_model_len"], target.context, "max_model_len")
    strings = (await target.ask("/tokenize", prompt=QUESTION, return_token_strs=True))["token_strs"]
    equal(len(strings), answer["count"], "number of token_strs")
    back = await target.ask("/detokenize", model="any", tokens=answer["tokens"])
    equal(back.get("prompt"), QUESTION, "text of /detokenize")


@check("/tokenize of messages counts what a chat counts")
async def tokenize_messages(target: Target) -> None:
    await target.needs("POST", "/tokenize")
    counted = (await target.ask("/tokenize", messages=MESSAGES))["count"]
    equal(counted, (await target.chat(max_tokens=1))["usage"]["prompt_tokens"], "count")


@check("GET /props tells the context, the slots and the template, as llama-server does")
async def props(target: Target) -> None:
    await target.needs("GET", "/props")
    answer = (await target.client.request("GET", "/props")).json()
    expect(answer["default_generation_settings"]["n_ctx"] > 0, "n_ctx: want tokens")
    expect(answer["total_slots"] > 0, "total_slots: want a number")
    for name in ("chat_template", "model_path", "build_info"):
        expect(isinstance(answer.get(name), str), f"{name}: want a string")


@check("GET /version tells the version, as vLLM does")
async def version(target: Target) -> None:
    await target.needs("GET", "/version")
    expect((await target.client.request("GET", "/version")).json().get("version"), "version: want a string")


@check("GET /v1/models/{id} answers the model's card")
async def model(target: Target) -> None:
    [first, *_] = (await target.client.request("GET", "/v1/models")).json()["data"]
    reply = await target.client.request("GET", f"/v1/models/{first['id']}")
    equal(reply.status, 200, "status")
    equal(reply.json().get("id"), first["id"], "id")
    equal(
        (await target.client.request("GET", "/v1/models/no-such-model")).status, 404, "status of another name"
    )


@check("embeddings, which a chat model does not give, are refused in words")
async def embeddings(target: Target) -> None:
    reply = await target.client.request("POST", "/v1/embeddings", body={"model": "any", "input": "x"})
    if reply.status == 200:
        raise SkippedError("the server gives embeddings")
    expect(reply.status in (400, 404, 501), f"status: want 501, 400 or 404, got {reply.status}")
    message = json.loads(reply.text)["error"]["message"]
    expect("embedding" in message.lower(), f"the message does not say so: {message}")
