"""The types of a prompt, and several choices in one request."""

from qwen_serve.bench.checks.base import PROMPT, Target, check, expect
from qwen_serve.bench.checks.base import expect_equal as equal
from qwen_serve.bench.checks.shapes import completion_shape

OTHER = "One two three four five six seven eight nine ten. " * 4
IDS = [100, 101, 102, 103, 104]


@check("a list of prompts gives a choice for each, in order, with summed usage")
async def strings(target: Target) -> None:
    alone = [await target.complete(prompt) for prompt in (PROMPT, OTHER)]
    both = await target.complete([PROMPT, OTHER])
    completion_shape(both)
    equal(len(both["choices"]), 2, "number of choices")
    for name in ("prompt_tokens", "completion_tokens"):
        equal(both["usage"][name], sum(answer["usage"][name] for answer in alone), f"usage.{name}")
    for choice, answer in zip(both["choices"], alone, strict=True):
        # A batch may decide a near-tie differently after some tokens; the beginning is equal.
        equal(choice["text"][:12], answer["choices"][0]["text"][:12], f"text of choice {choice['index']}")


@check("a prompt of token ids is taken as it is")
async def token_ids(target: Target) -> None:
    answer = await target.complete(IDS)
    completion_shape(answer)
    equal(answer["usage"]["prompt_tokens"], len(IDS), "usage.prompt_tokens")


@check("a list of lists of token ids gives a choice for each")
async def token_id_lists(target: Target) -> None:
    answer = await target.complete([IDS, IDS[:2]])
    completion_shape(answer)
    equal(len(answer["choices"]), 2, "number of choices")
    equal(answer["usage"]["prompt_tokens"], len(IDS) + 2, "usage.prompt_tokens")


@check("token ids give the text that the same prompt as a string gives")
async def token_ids_equal_string(target: Target) -> None:
    ids = await target.tokenizer().encode(PROMPT)
    equal(await target.text(ids), await target.text(), "text")


@check("n choices per prompt, indexed through, completion tokens summed")
async def n(target: Target) -> None:
    answer = await target.complete(n=3, max_tokens=5, ignore_eos=True, temperature=1.0)
    completion_shape(answer)
    equal(len(answer["choices"]), 3, "number of choices")
    equal(answer["usage"]["completion_tokens"], 15, "usage.completion_tokens")
    answer = await target.complete([PROMPT, OTHER], n=2, max_tokens=5)
    completion_shape(answer)
    equal(len(answer["choices"]), 4, "number of choices of two prompts")
    texts = [choice["text"] for choice in answer["choices"]]
    expect(texts[0] == texts[1] and texts[2] == texts[3], f"greedy choices of one prompt differ: {texts}")


@check("echo puts the prompt before the text")
async def echo(target: Target) -> None:
    plain = await target.complete()
    echoed = await target.complete(echo=True)
    equal(echoed["choices"][0]["text"], PROMPT + plain["choices"][0]["text"], "text")
    # the numbers of cached and drafted tokens may differ
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        equal(echoed["usage"][count], plain["usage"][count], f"usage.{count}")


@check("text outside ASCII goes in and out unharmed")
async def unicode(target: Target) -> None:
    prompt = "Zürich 東京 🦊 العربية. " * 3
    answer = await target.complete(prompt, echo=True, max_tokens=1)
    expect(
        answer["choices"][0]["text"].startswith(prompt), f"echo: got {answer['choices'][0]['text'][:80]!r}"
    )
