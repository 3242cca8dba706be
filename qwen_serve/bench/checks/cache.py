"""The prefix cache: which requests share prefixes, and what responses say about it."""

from uuid import uuid4

from qwen_serve.bench.checks.base import COMPLETIONS, PROMPT, Answer, Target, check, expect
from qwen_serve.bench.checks.base import expect_equal as equal
from qwen_serve.bench.load.client import clip, error_text


def _cached(answer: Answer) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@check("a prompt is cached for those with the same cache_salt, and for no others")
async def salt(target: Target) -> None:
    prompt, one, other = f"{uuid4()} {PROMPT}", uuid4().hex, uuid4().hex
    await target.complete(prompt, cache_salt=one)
    expect(_cached(await target.complete(prompt, cache_salt=one)) > 0, "nothing is cached for the same salt")
    for stranger in ({"cache_salt": other}, {}):
        answer = await target.complete(prompt, **stranger)
        cached, length = _cached(answer), answer["usage"]["prompt_tokens"]
        expect(cached < length / 2, f"{cached} of {length} tokens are cached with {stranger or 'no salt'}")


@check("a cache_salt that is no text, empty or over 1,024 characters long is refused")
async def bad_salt(target: Target) -> None:
    for bad in (7, "", "x" * 1025):
        body = {"prompt": "Hi", "max_tokens": 1, "cache_salt": bad}
        reply = await target.client.request("POST", COMPLETIONS, body=body)
        equal(reply.status, 400, f"status for cache_salt {clip(str(bad), 20)!r} ({error_text(reply)})")


@check("cache_report tells why the rest of a prompt was not cached, and up to where it was known")
async def report(target: Target) -> None:
    prompt = f"{uuid4()} {PROMPT}"
    first = await target.complete(prompt, cache_report=True)
    miss = first["usage"]["prompt_tokens_details"].get("cache_miss")
    expect(isinstance(miss, dict), f"cache_miss of a new prompt: want an object, got {miss!r}")
    expect(miss.get("reason") in ("new", "diverged", "evicted", "off"), f"reason: got {miss.get('reason')!r}")
    expect(type(miss.get("position")) is int, f"position: want an integer, got {miss.get('position')!r}")
    plain = await target.complete(prompt)
    expect(
        "cache_miss" not in plain["usage"]["prompt_tokens_details"], "cache_miss comes without cache_report"
    )
