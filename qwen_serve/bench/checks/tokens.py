"""Rules about single tokens (bias, bans, stops), and limits on the number of tokens."""

from typing import Any

from qwen_serve.bench.checks.base import COMPLETIONS, INVOCATIONS, PROMPT, Target, check, expect
from qwen_serve.bench.checks.base import expect_equal as equal


async def _ids(target: Target, **fields: Any) -> list[int]:
    """The token ids of a greedy completion, from the names that `return_tokens_as_token_ids` gives."""
    body = {"logprobs": 0, "return_tokens_as_token_ids": True, "max_tokens": 12, "ignore_eos": True}
    answer = await target.complete(**{**body, **fields})
    return [int(name.removeprefix("token_id:")) for name in answer["choices"][0]["logprobs"]["tokens"]]


@check("logit_bias: -100 bans a token, 100 forces it")
async def logit_bias(target: Target) -> None:
    plain = await _ids(target)
    first, other = plain[0], next(token for token in plain if token != plain[0])
    expect(first not in await _ids(target, logit_bias={str(first): -100}), f"{first} came in spite of -100")
    equal(await _ids(target, logit_bias={str(other): 100}), [other] * 12, "tokens with a bias of 100")


@check("allowed_token_ids: no other token is chosen")
async def allowed(target: Target) -> None:
    pair = sorted(set(await _ids(target)))[:2]
    found = set(await _ids(target, allowed_token_ids=pair))
    expect(found <= set(pair), f"allowed were {pair}, but {sorted(found)} came")


@check("bad_words do not come")
async def bad_words(target: Target) -> None:
    text = await target.text(max_tokens=24)
    word = next(word for word in text.split() if word.isalpha())
    clean = await target.text(max_tokens=24, bad_words=[word])
    expect(f" {word} " not in f" {clean} ", f"{word!r} came: {clean!r}")


@check("stop_token_ids end a text before the token, include_stop_str_in_output behind it")
async def stop_token_ids(target: Target) -> None:
    plain = await _ids(target)
    stop = plain[len(plain) // 2]
    place = plain.index(stop)
    for included in (False, True):
        fields = {"stop_token_ids": [stop], "include_stop_str_in_output": included, "ignore_eos": True}
        answer = await target.complete(max_tokens=12, **fields)
        equal(answer["choices"][0]["finish_reason"], "stop", "finish_reason")
        equal(answer["usage"]["completion_tokens"], place + included, f"tokens with included {included}")


@check("include_stop_str_in_output leaves a stop string in the text")
async def included_stop(target: Target) -> None:
    text = await target.text(max_tokens=48)
    middle = text[len(text) // 3 :][:7]
    wanted, fields = (
        text[: text.index(middle) + len(middle)],
        {"stop": middle, "include_stop_str_in_output": True},
    )
    equal(await target.text(max_tokens=48, **fields), wanted, "text")
    chunks = await target.chunks(COMPLETIONS, prompt=PROMPT, max_tokens=48, temperature=0.0, **fields)
    equal("".join(choice["text"] for chunk in chunks for choice in chunk["choices"]), wanted, "streamed text")


@check("min_tokens: an answer does not end before")
async def min_tokens(target: Target) -> None:
    ended = await target.chat(max_tokens=512)
    length = ended["usage"]["completion_tokens"]
    answer = await target.chat(max_tokens=512, min_tokens=length + 8)
    used = answer["usage"]["completion_tokens"]
    expect(used >= length + 8, f"completion_tokens: {used}, with min_tokens {length + 8}")


@check("n_predict is another name of max_tokens")
async def n_predict(target: Target) -> None:
    for path in (COMPLETIONS, INVOCATIONS):
        answer = await target.ask(path, prompt=PROMPT, temperature=0.0, ignore_eos=True, n_predict=5)
        equal(answer["usage"]["completion_tokens"], 5, f"completion_tokens of {path}")


@check("a completion without max_tokens has 16 tokens")
async def default_limit(target: Target) -> None:
    answer = await target.ask(COMPLETIONS, prompt=PROMPT, temperature=0.0, ignore_eos=True)
    equal(answer["usage"]["completion_tokens"], 16, "completion_tokens")
