"""Log-probabilities of generated tokens and of the prompt's, in OpenAI's two formats and vLLM's."""

from typing import Any

from qwen_serve.bench.checks.base import CHAT, COMPLETIONS, MESSAGES, PROMPT, Answer, Target, check, expect
from qwen_serve.bench.checks.base import expect_equal as equal

SHAPE_NOISE = 0.5
"""Allowed difference of a log-probability between batches of different shapes."""


def _of(answer: Answer) -> Any:
    told = answer["choices"][0]["logprobs"]
    expect(isinstance(told, dict), f"choices[0].logprobs: want an object, got {told!r}")
    return told


def _sorted(values: list[float], what: str) -> None:
    expect(all(value <= 0 for value in values), f"{what}: want none above 0, got {values}")
    expect(values == sorted(values, reverse=True), f"{what}: want the likeliest first, got {values}")


@check("logprobs and top_logprobs in a chat: bytes that spell the answer, alternatives in order")
async def chat(target: Target) -> None:
    answer = await target.chat(logprobs=True, top_logprobs=3)
    content = _of(answer)["content"]
    spelled = bytes(byte for told in content for byte in told["bytes"] or []).decode()
    equal(spelled.strip(), answer["choices"][0]["message"]["content"].strip(), "text of the bytes")
    for told in content:
        expect(told["logprob"] <= 0, f"logprob of {told['token']!r}: got {told['logprob']}")
        equal(len(told["top_logprobs"]), 3, "alternatives")
        _sorted([other["logprob"] for other in told["top_logprobs"]], "top_logprobs")
    plain = await target.chat()
    equal(plain["choices"][0]["logprobs"], None, "logprobs where none were asked for")


@check("logprobs of a completion: parallel lists, whose tokens are the text, each greedy one the likeliest")
async def completion(target: Target) -> None:
    answer = await target.complete(logprobs=2, max_tokens=12, ignore_eos=True)
    told, text = _of(answer), answer["choices"][0]["text"]
    equal("".join(told["tokens"][:12]), text, "text of the tokens")
    equal(
        told["text_offset"][:12],
        [len("".join(told["tokens"][:n])) for n in range(12)],
        "places of the tokens",
    )
    for logprob, top in zip(told["token_logprobs"], told["top_logprobs"], strict=True):
        expect(logprob <= 0, f"token_logprobs: got {logprob}")
        equal(max(top.values()), logprob, "the likeliest")


@check("echo with logprobs and max_tokens 0 scores the prompt, and generates nothing")
async def echo(target: Target) -> None:
    answer = await target.complete(echo=True, logprobs=1, max_tokens=0)
    told = _of(answer)
    equal(answer["choices"][0]["text"], PROMPT, "text")
    equal(answer["usage"]["completion_tokens"], 0, "completion_tokens")
    equal(len(told["tokens"]), answer["usage"]["prompt_tokens"], "tokens")
    expect(told["token_logprobs"][0] is None, "token_logprobs[0]: nothing is known of the first token")
    expect(all(value <= 0 for value in told["token_logprobs"][1:]), "token_logprobs: want none above 0")


@check("what was generated with some log-probabilities has the same ones as a prompt")
async def generated_and_given(target: Target) -> None:
    fields: dict[str, Any] = {"logprobs": 0, "ignore_eos": True}
    made = await target.complete(max_tokens=12, **fields)
    text = PROMPT + made["choices"][0]["text"]
    told = _of(made)["token_logprobs"][:12]
    given = _of(await target.complete(text, echo=True, max_tokens=1, **fields))["token_logprobs"]
    start = made["usage"]["prompt_tokens"]
    for n, (one, two) in enumerate(zip(told, given[start : start + 12], strict=True)):
        expect(abs(one - two) <= SHAPE_NOISE, f"token {n}: {one} where it is generated, {two} in a prompt")


@check("prompt_logprobs: null, then each token of the prompt by its id")
async def of_prompt(target: Target) -> None:
    answer = await target.complete(prompt_logprobs=1, max_tokens=1)
    told = answer["choices"][0]["prompt_logprobs"]
    equal(len(told), answer["usage"]["prompt_tokens"], "tokens")
    equal(told[0], None, "the first")
    text = ""
    for entry in told[1:]:
        own = next(iter(entry.values()))
        expect(own["logprob"] <= 0 and own["rank"] >= 1, f"got {own}")
        text += own["decoded_token"]
    expect(PROMPT.endswith(text), f"the tokens are {text[:60]!r}")


@check("logprobs are streamed with the text: together they are those of the whole answer")
async def streamed(target: Target) -> None:
    body: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    whole = _of(await target.complete(max_tokens=12, logprobs=1, ignore_eos=True))
    chunks = await target.chunks(COMPLETIONS, prompt=PROMPT, logprobs=1, **body)
    parts = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    equal([token for part in parts for token in part["tokens"]], whole["tokens"], "tokens")
    said = await target.chunks(CHAT, messages=MESSAGES, logprobs=True, max_tokens=12, temperature=0.0)
    tokens = [
        told["token"]
        for chunk in said
        for choice in chunk["choices"]
        for told in (choice["logprobs"] or {"content": []})["content"]
    ]
    answer = await target.chat(logprobs=True, max_tokens=12)
    equal(tokens, [told["token"] for told in _of(answer)["content"]], "tokens of a chat")
