"""Thinking ends at its budget and when it loops. Tokens are the same with any drafts."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_serve.llamacpp import Model
from qwen_serve.server.engine import Engine, GenerateRequest, Grammar, SamplingParams, ThinkingLimits, Vocab
from qwen_serve.server.engine.sampling.thinking import ROUNDS, SPAN, STRIDE, goes_in_circles
from tests.marks import slow_but
from tests.server.engine.helpers import EXACT, Alone, random_prompt, running

N = 60
PROMPTS = [random_prompt(random.Random(i), 20 + 30 * i) for i in range(4)]
GREEDY = SamplingParams(ignore_eos=True)
BRIDGE = (300, 301, 3609, 302)  # 3609 is nano's </think>
MIXES: dict[str, dict[str, Any]] = {
    "plain": {"speculation": "off"},
    "drafts": {"speculation": "ngram", "draft_always": True},
    "head": {"speculation": "both", "draft_always": True},
    "too few cells": {"ctx_size": 300, "speculation": "off"},
    "in the graph": {"sampling": "device"},
}


async def think(engine: Engine, limits: ThinkingLimits, *, stream: bool = True) -> list[list[int]]:
    async def one(prompt: list[int]) -> list[int]:
        generation = engine.submit(
            GenerateRequest(engine.prompt(prompt), GREEDY, N, thinking=limits, stream=stream)
        )
        return [token async for new in generation for token in new]

    return list(await asyncio.gather(*map(one, PROMPTS)))


@pytest.fixture(scope="module")
def expected(nano_f32: Path) -> dict[int, list[list[int]]]:
    """The expected answer by budget: the best tokens up to the budget, the forced end of thinking, and the
    best tokens after it."""
    reference = Alone(nano_f32, **EXACT)

    def answer(prompt: list[int], budget: int) -> list[int]:
        begun = [*reference.greedy(prompt, budget), *BRIDGE]
        return begun + reference.greedy([*prompt, *begun], N - len(begun))

    answers = {budget: [answer(prompt, budget) for prompt in PROMPTS] for budget in (0, 1, 37)}
    reference.close()
    return answers


@pytest.mark.parametrize("mix", slow_but(["drafts", "head"], MIXES))
async def test_the_budget_is_the_same_token_whatever_is_drafted(
    mix: str, nano_f32: Path, expected: dict[int, list[list[int]]]
) -> None:
    with running(nano_f32, **EXACT, **MIXES[mix]) as engine:
        for budget, answers in expected.items():
            for stream in (True, False) if budget > 1 else (True,):
                assert await think(engine, ThinkingLimits(BRIDGE, budget), stream=stream) == answers


@pytest.mark.parametrize("mix", slow_but(["plain"], MIXES))
async def test_the_guard_ends_circles(mix: str, nano_f32: Path) -> None:
    """With greedy sampling nano soon repeats itself on noise. The guard ends it at the same token in every
    mix of requests."""
    limits = ThinkingLimits(BRIDGE, None, loop_guard=True)
    ends = []
    with running(nano_f32, **EXACT, **{"ctx_size": 2048, **MIXES[mix]}) as engine:
        for prompt in PROMPTS[:2]:
            generation = engine.submit(GenerateRequest(engine.prompt(prompt), GREEDY, 400, thinking=limits))
            tokens = [token async for new in generation for token in new]
            watch = generation.request.thinking
            assert watch is not None
            assert watch.tokens == (tokens.index(BRIDGE[2]) if BRIDGE[2] in tokens else 400)
            if BRIDGE[2] in tokens:
                end = tokens.index(BRIDGE[2]) - 2
                assert end % STRIDE == 0
                assert goes_in_circles("".join(map(chr, tokens[:end])))
            ends.append(tokens)
        free = engine.submit(GenerateRequest(engine.prompt(PROMPTS[0]), GREEDY, 400))
        assert BRIDGE[2] not in [token async for new in free for token in new]
    if mix not in SEEN:
        SEEN[mix] = ends
    assert all(other == ends for other in SEEN.values())


SEEN: dict[str, list[list[int]]] = {}


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(0, 300), st.integers(0, 300))
def test_circles(circle: list[int], before: int, cut: int) -> None:
    rng = random.Random(before)
    start = "".join(chr(1000 + rng.randrange(1000)) for _ in range(before))
    text = "".join(map(chr, circle)) * 200
    assert goes_in_circles(start + text[: max(SPAN, (ROUNDS + 1) * len(circle)) + 20 + cut])
    assert not goes_in_circles(start + text[: SPAN // 2])


def test_prose_is_no_circle() -> None:
    rng = random.Random(3)
    words = [[rng.randrange(3000) for _ in range(rng.randint(1, 4))] for _ in range(60)]
    text = "".join(chr(token) for _ in range(4000) for token in rng.choice(words))
    assert not any(goes_in_circles(text[:end]) for end in range(STRIDE, len(text), STRIDE))
    table = "".join(chr(5) + chr(6) * 12 + chr(rng.randrange(100, 3000)) for _ in range(500))
    assert not any(goes_in_circles(table[:end]) for end in range(STRIDE, len(table), STRIDE))


async def test_a_penalty_for_thoughts_ends_with_them(nano_f32: Path) -> None:
    """The answer equals the one after the same thoughts without a penalty."""
    reference = Alone(nano_f32, **EXACT)
    with running(nano_f32, **EXACT) as engine:
        plain = await think(engine, ThinkingLimits(BRIDGE, 40))
        penalised = await think(engine, ThinkingLimits(BRIDGE, 40, repetition_penalty=10.0))
    assert plain != penalised
    for prompt, answer in zip(PROMPTS, penalised, strict=True):
        thoughts = answer[:40]
        assert answer[40:44] == list(BRIDGE)
        assert len(set(thoughts)) == 40, "nothing comes twice"
        assert answer[44:] == reference.greedy([*prompt, *answer[:44]], N - 44)
    reference.close()


@pytest.fixture(scope="module")
def vocab(nano_f32: Path) -> Vocab:
    return Vocab(Model(nano_f32, n_gpu_layers=0))


def test_thoughts_that_end_by_themselves_are_left_alone(vocab: Vocab) -> None:
    """They end by the token. Its text, in other tokens, quotes it."""
    watch = ThinkingLimits(BRIDGE, 50).begin(vocab)
    quoted = [t for c in "</think>" for t in vocab.tokenize(c, special=False)]
    assert not watch.follow([300] * 20 + quoted)
    assert watch.open
    assert not watch.follow([3609])
    assert not watch.open
    assert watch.tokens == 20 + len(quoted)
    assert watch.horizon is None
    assert not watch.follow([300] * 100)
    assert watch.tokens == 20 + len(quoted)


@pytest.mark.parametrize(
    ("text", "closes"),
    [
        ("<tool_call>\n<function=f>\n<parameter=", True),
        ("<tool_call>\n<function=f>\n</function>", True),
        ("<tool_call>\n<function=f\n<parameter=", True),
        ('<tool_call>\n{"name": "f"', True),
        ("<tool_call> is how a call begins", False),
        ("<tool_call>\n<function=f> is how it goes on", False),
        ("<tool_call>\n<functional", False),
        ("<tool_call>\n{1}", False),
    ],
)
@pytest.mark.parametrize("calls", [True, False])
def test_a_call_ends_the_thoughts(vocab: Vocab, text: str, closes: bool, calls: bool) -> None:
    """Only where tools are offered, and if a call follows the tag. Until that is clear, no limit acts."""
    watch = ThinkingLimits(BRIDGE, 20, calls=calls).begin(vocab)
    assert not watch.follow([300] * 19)
    tokens = vocab.tokenize(text, special=True)
    limited = [watch.follow([token]) for token in tokens]
    if calls and closes:
        assert not any(limited)
        assert (watch.open, watch.tokens) == (False, 19)
    else:
        assert limited[-1] == watch.open
        assert watch.tokens == 19 + len(tokens)
        assert limited[0] is not calls


def test_thoughts_do_not_break_off_in_a_character(vocab: Vocab) -> None:
    half = next(t for t in range(vocab.n_real) if vocab.token_bytes(t) == "的".encode()[:1])
    watch = ThinkingLimits(BRIDGE, 3).begin(vocab)
    assert not watch.follow([300, 301, half])
    assert watch.horizon == 1
    assert watch.follow([300])


PERSON = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize("mix", slow_but(["head"], MIXES))
async def test_the_grammar_begins_behind_the_thoughts(mix: str, nano_f32: Path) -> None:
    """This holds if the end comes in the middle of a draft, as with thoughts that are copied from the
    prompt."""
    text = {"additionalProperties": False, **PERSON}
    lark = 'start: THINK </think> "\\n\\n" @answer\nTHINK: /(.|\\n)*/ & ~(/(.|\\n)*/ /<\\/think>/ /(.|\\n)*/)'
    grammars = [
        {"name": "all", "lark_grammar": lark},
        {"name": "answer", "lark_grammar": "start: %json " + json.dumps(text)},
    ]
    with running(nano_f32, **EXACT, **{"ctx_size": 2048, **MIXES[mix]}) as engine:
        grammar: Grammar = engine.grammars.compile(json.dumps({"grammars": grammars})).result(60)
        tokenize = engine.vocab.tokenize
        bridge = tuple(tokenize("\n</think>\n\n", special=True))
        once = tokenize('<think>\nwell, 1 2 3 4\n</think>\n\n{"n": 12}', special=True)
        answers = []
        for seed in range(4):
            prompt = engine.prompt(once * 4 + tokenize("<think>\nwell, 1", special=True))
            params = SamplingParams(temperature=0.4 * seed, seed=seed, top_k=20)
            limits = ThinkingLimits(bridge, 60)
            generation = engine.submit(
                GenerateRequest(
                    prompt, params, 300, constraint=grammar.begin(), thinking=limits, stream=seed % 2 == 0
                )
            )
            tokens = [token async for new in generation for token in new]
            whole = b"".join(map(engine.vocab.token_bytes, tokens)).decode()
            assert whole.count("</think>\n\n") == 1, whole
            if generation.finish_reason == "stop":
                assert set(json.loads(whole.split("</think>")[1])) == {"n"}
            answers.append(tokens)
        if MIXES[mix].get("draft_always"):
            assert sum(one.accepted for one in engine.stats().drafts.values()) > 0
    ENDED.setdefault("any", answers)
    assert answers == ENDED["any"]


ENDED: dict[str, list[list[int]]] = {}


def test_a_watch_is_cheap_once_the_block_is_closed(vocab: Vocab) -> None:
    watch = ThinkingLimits(BRIDGE, 5).begin(vocab)
    watch.follow(BRIDGE)
    assert watch.horizon is None
