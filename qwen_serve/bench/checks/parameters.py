"""Sampling parameters, each checked by its effect on the text or the token counts."""

from typing import Any

from qwen_serve.bench.checks.base import CHAT, INVOCATIONS, MESSAGES, PROMPT, Target, check, expect
from qwen_serve.bench.checks.base import expect_equal as equal

# Each leaves one candidate, so the text equals the greedy one at any temperature.
NARROW: tuple[dict[str, float], ...] = ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0})
OPEN_PROMPT = "Once upon a time"


@check("temperature 0 is greedy: the same text every time")
async def greedy(target: Target) -> None:
    equal(await target.text(max_tokens=48), await target.text(max_tokens=48), "text of the second request")


@check("top_k, top_p and min_p, set to keep one candidate, make any temperature greedy")
async def narrow(target: Target) -> None:
    text = await target.text(OPEN_PROMPT, max_tokens=24)
    for fields in NARROW:
        equal(
            await target.text(OPEN_PROMPT, max_tokens=24, temperature=2.0, **fields),
            text,
            f"text with {fields}",
        )


@check("the same seed gives the same text, other seeds give others")
async def seed(target: Target) -> None:
    async def sample(seed: int) -> str:
        return await target.text(OPEN_PROMPT, max_tokens=32, temperature=2.0, top_p=1.0, seed=seed)

    equal(await sample(7), await sample(7), "text of the same seed")
    texts = {await sample(seed) for seed in range(4)}
    expect(len(texts) > 1, "four seeds at temperature 2 gave one text")


@check("without a seed, sampling differs from request to request")
async def no_seed(target: Target) -> None:
    texts = {await target.text(OPEN_PROMPT, max_tokens=32, temperature=2.0, top_p=1.0) for _ in range(4)}
    expect(len(texts) > 1, "four requests at temperature 2 without a seed gave one text")


@check("frequency_penalty and presence_penalty change repeating text")
async def additive_penalties(target: Target) -> None:
    text = await target.text(max_tokens=100, ignore_eos=True)
    for fields in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0, "frequency_penalty": 1.0}):
        penalised = await target.text(max_tokens=100, ignore_eos=True, **fields)
        expect(penalised != text, f"{fields} changed nothing in 100 tokens of repeating text")


@check("repetition_penalty and repeat_penalty are two names of one thing, which changes repeating text")
async def repetition_penalty(target: Target) -> None:
    text = await target.text(max_tokens=100, ignore_eos=True)
    for _ in range(3):  # drafts change the batch's shape, which may decide a near-tie differently
        one = await target.text(max_tokens=100, ignore_eos=True, repetition_penalty=10.0)
        two = await target.text(max_tokens=100, ignore_eos=True, repeat_penalty=10.0)
        if one == two:
            break
    equal(two, one, "text with repeat_penalty")
    expect(one != text, "repetition_penalty 10 changed nothing in 100 tokens of repeating text")


@check("a stop string ends the text before it, with finish_reason `stop`")
async def stop(target: Target) -> None:
    text = await target.text(max_tokens=48)
    middle = text[len(text) // 3 :][:7]
    wanted = text[: text.index(middle)]
    for value in (middle, [middle], ["\x00never", middle]):
        answer = await target.complete(max_tokens=48, stop=value)
        equal(answer["choices"][0]["text"], wanted, f"text with stop {value!r}")
        equal(answer["choices"][0]["finish_reason"], "stop", "finish_reason")
        used = answer["usage"]["completion_tokens"]
        expect(used < 48, f"completion_tokens: {used} for a text that stopped early")


@check("a stop string that does not occur changes nothing")
async def stop_absent(target: Target) -> None:
    plain = await target.complete(max_tokens=48)
    stopped = await target.complete(max_tokens=48, stop=["\x00never", "lazy doggerel"])
    equal(stopped["choices"][0]["text"], plain["choices"][0]["text"], "text")
    equal(stopped["choices"][0]["finish_reason"], plain["choices"][0]["finish_reason"], "finish_reason")


@check("ignore_eos goes on to max_tokens where the answer would end")
async def ignore_eos(target: Target) -> None:
    ended = await target.chat(max_tokens=512)
    length = ended["usage"]["completion_tokens"]
    answer = await target.chat(max_tokens=length + 32, ignore_eos=True)
    equal(answer["usage"]["completion_tokens"], length + 32, "completion_tokens")
    equal(answer["choices"][0]["finish_reason"], "length", "finish_reason")


@check("max_completion_tokens limits a chat as max_tokens does")
async def max_completion_tokens(target: Target) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "temperature": 0.0, "ignore_eos": True}
    answer = await target.ask(CHAT, **body, max_completion_tokens=5)
    equal(answer["usage"]["completion_tokens"], 5, "completion_tokens")


@check("a max_tokens beyond the context is clamped; absent on /invocations, it is all of the context")
async def max_tokens_unbounded(target: Target) -> None:
    text = await target.text(max_tokens=40)
    late = text[20:]  # occurs early, but after 16 tokens, a usual default of max_tokens
    wanted = text[: text.index(late)]
    for fields in ({"max_tokens": 10**9}, {}):
        body = {"prompt": PROMPT, "temperature": 0.0, "ignore_eos": True, "stop": [late], **fields}
        choice = (await target.ask(INVOCATIONS, **body))["choices"][0]
        equal(choice["finish_reason"], "stop", f"finish_reason with {fields or 'no max_tokens'}")
        equal(choice["text"], wanted, f"text with {fields or 'no max_tokens'}")


@check("null is the same as absent, and fields of the OpenAI API that do not apply are let through")
async def null_and_unknown(target: Target) -> None:
    absent = dict.fromkeys(("stop", "seed", "stream_options", "top_p", "presence_penalty", "n", "logit_bias"))
    equal(await target.text(**absent, user="someone", logprobs=None), await target.text(), "text")
