"""Requests of every kind are launched ahead, and none stops others from it."""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qwen_serve.llamacpp.row_sampler import HAS_ROW_SAMPLER, Bits
from qwen_serve.server.engine import SamplingParams
from qwen_serve.server.engine.errors import FormatTooComplex
from qwen_serve.server.engine.sampling.grammar import Grammar, GrammarConstraint
from tests.marks import slow_but
from tests.server.engine.helpers import Question, ask, ask_at_once, random_prompt, running
from tests.server.engine.launching import PLAIN, ahead, assert_right

pytestmark = pytest.mark.skipif(not HAS_ROW_SAMPLER, reason="this llama.cpp has no row sampler")

N = 40

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "top_k": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "the card's": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "presence_penalty": 1.5},
    "a window of penalties": {"temperature": 1.0, "repetition_penalty": 1.3, "repeat_last_n": 8},
    "top_p alone": {"temperature": 1.0, "top_p": 0.95},
    "min_p": {"temperature": 1.2, "min_p": 0.05},
    "typical": {"temperature": 1.0, "typical_p": 0.9},
    "top-n-sigma": {"temperature": 1.0, "top_n_sigma": 1.5},
    "XTC": {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    "DRY": {"dry_multiplier": 2.0, "dry_allowed_length": 1},
    "DRY first, with penalties": {
        "dry_multiplier": 0.8,
        "repetition_penalty": 1.1,
        "temperature": 0.8,
        "samplers": ("dry", "penalties", "temperature"),
    },
    "mirostat": {"temperature": 1.0, "mirostat": 2},
    "mirostat 1": {"temperature": 0.9, "mirostat": 1, "mirostat_tau": 3.0},
    "dynamic temperature": {"temperature": 0.8, "top_k": 20, "dynatemp_range": 0.5},
    "five tokens or more": {"temperature": 1.0, "top_p": 0.1, "min_p": 0.9, "min_keep": 5},
    "bias": {"logit_bias": ((300, 2.5), (301, -9.0))},
    "allowed": {"allowed_token_ids": tuple(range(256, 400))},
    "bad words": {"bad_words": ((300,), (301, 302))},
    "min_tokens": {"min_tokens": 30, "ignore_eos": False},
    "log-probabilities": {"logprobs": 20},
    "drawn, with log-probabilities": {"temperature": 1.0, "logprobs": 5},
}
"""What `RowSampler` has."""

GRAMMAR = r'start: /[a-z ]{30,90}/ "forced" /[a-z ]{30,90}/'


def of(kind: str) -> SamplingParams:
    return SamplingParams(**{"ignore_eos": True, "seed": 7, **KINDS[kind]})


def batch(*kinds: str) -> list[Question]:
    prompts = [random_prompt(random.Random(i), 5 + 7 * i) for i in range(len(kinds))]
    return [Question(prompt, N, params=of(kind)) for prompt, kind in zip(prompts, kinds, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
async def test_three_greedy_requests_beside_any_other(nano_f32: Path, kind: str) -> None:
    asked = batch("greedy", "greedy", "greedy", kind)
    with running(nano_f32, **PLAIN, async_scheduling=False, prefix_cache=False) as engine:
        alone = [(await ask_at_once(engine, [one]))[0] for one in asked]
    with ahead(nano_f32, prefix_cache=False) as (engine, launched):
        assert await ask_at_once(engine, asked) == alone
        assert launched["first"] + launched["again"] + launched["fewer"] >= N - 2


async def test_a_grammar_beside_them(nano_f32: Path) -> None:
    """The text that it forces comes token by token in the steps of the others."""
    asked = batch("greedy", "greedy", "the card's", "greedy")
    asked[3].grammar = GRAMMAR
    with running(nano_f32, **PLAIN, async_scheduling=False, prefix_cache=False) as engine:
        alone = [(await ask_at_once(engine, [one]))[0] for one in asked]
    with ahead(nano_f32, prefix_cache=False) as (engine, launched):
        assert await ask_at_once(engine, asked) == alone
        assert launched["first"] + launched["again"] + launched["fewer"] >= N - 2


def own_grammar(i: int) -> str:
    """Another grammar for each number: what it forces, what it leaves, and whether its text may end."""
    kind = i % 4
    if kind == 0:
        return f'start: "{i}: " /[{"abcdefgh"[i // 8]}-z ]{{{i + 3}}}/'
    if kind == 1:
        return f'start: /[0-9]+/ " of {i}" ("," /[a-f]{{{1 + i % 5}}}/)*'
    if kind == 2:
        return f'start: ("yes {i}" | "no {i}" | /[k-t]{{1,{i}}}/) "."'
    return "start: %json " + json.dumps(
        {"type": "object", "properties": {f"k{i}": {"type": "integer"}}, "required": [f"k{i}"]}
    )


@pytest.mark.parametrize("more", slow_but([{}], [{}, {"speculation": "both", "draft_always": True}]))
async def test_sixty_four_grammars_at_once(nano_f32: Path, more: dict[str, Any]) -> None:
    """Each row is kept to its own, also where half of the requests draw their tokens."""
    rng = random.Random(3)
    asked = [
        Question(
            random_prompt(rng, 5 + i % 23),
            N,
            params=of("top_k" if i % 2 else "greedy"),
            grammar=own_grammar(i),
        )
        for i in range(64)
    ]
    for one in asked:
        one.params = replace(one.params, ignore_eos=False)
    places = {"parallel": 64, "ctx_size": 64 * 256, "prefix_cache": False, **more}
    with ahead(nano_f32, **places) as (engine, _):
        alone = [(await ask_at_once(engine, [one]))[0] for one in asked]
        assert len({tuple(one.tokens) for one in alone}) > 60
        for _ in range(2):
            rng.shuffle(order := [*range(64)])
            found = await ask_at_once(engine, [asked[i] for i in order])
            assert found == [alone[i] for i in order]


async def test_forced_text_keeps_the_shape_of_others_steps(nano_f32: Path) -> None:
    """Also in steps behind which none is launched ahead, since prompts come next."""
    rng = random.Random(9)
    asked = [
        Question(
            random_prompt(rng, length),
            N,
            params=replace(of("greedy"), ignore_eos=False),
            grammar=r'start: /[a-z]{2}/ ("some forced text" /[a-z]{2}/)+',
        )
        for length in (5, 200, 9, 150, 30, 250)
    ]
    with ahead(nano_f32, prefix_cache=False, ubatch_size=32, parallel=3) as (engine, _):
        alone = [(await ask_at_once(engine, [one]))[0] for one in asked]
        assert await ask_at_once(engine, asked) == alone
        rows = [steps.rows for steps in engine.stats().step_totals if steps.kind == "verify"]
        assert rows == [1]  # a request alone reads at once what is forced


async def test_grammars_of_requests_that_leave_or_lose_their_slots(nano_f32: Path) -> None:
    """Others' masks are right when a client leaves, an answer ends, or a request begins again."""
    rng = random.Random(5)
    asked = [
        Question(
            random_prompt(rng, rng.randrange(2, 60)),
            rng.randrange(2, 140),
            cancel_after=rng.randrange(1, 20) if i % 5 == 0 else None,
            params=replace(of("top_k" if i % 2 else "greedy"), ignore_eos=False),
            grammar=r"start: /[a-z ]{400,500}/" if i % 3 else own_grammar(i % 32),
        )
        for i in range(30)
    ]
    with running(nano_f32, **PLAIN, async_scheduling=False, prefix_cache=False) as engine:
        alone = [(await ask_at_once(engine, [replace(one, cancel_after=None)]))[0] for one in asked]
    with ahead(nano_f32, ctx_size=256, parallel=8) as (engine, launched):
        assert_right(asked, await ask_at_once(engine, asked), alone)
        assert engine.stats().preemptions
        assert launched.total()


async def test_a_grammar_without_a_mask_fails_its_own_request(
    nano_f32: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, completed = Grammar.begin, GrammarConstraint.completed
    begun: list[GrammarConstraint] = []
    masks: list[object] = []

    def watched(grammar: Grammar) -> GrammarConstraint:
        begun.append(begin(grammar))
        return begun[-1]

    def failing(constraint: GrammarConstraint, computed: list[Bits], draft: Sequence[int]) -> list[Bits]:
        if constraint is begun[1]:
            masks.append(computed)
            if len(masks) == 5:
                raise FormatTooComplex("grammar", "it is too complex")
        return completed(constraint, computed, draft)

    asked = batch("greedy", "the card's", "greedy", "greedy")
    for one in asked[1:]:
        one.grammar = GRAMMAR
    with ahead(nano_f32, prefix_cache=False) as (engine, _):
        alone = [(await ask_at_once(engine, [one]))[0] for one in asked]
        monkeypatch.setattr(Grammar, "begin", watched)
        monkeypatch.setattr(GrammarConstraint, "completed", failing)
        found = await asyncio.gather(*(ask(engine, one) for one in asked), return_exceptions=True)
        assert isinstance(found[2], FormatTooComplex)
        assert len(masks) == 5
        assert [*found[:2], found[3]] == [*alone[:2], alone[3]]
