"""Answers are the same with any combination of the engine's optimizations, and nothing is left behind."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qwen_serve.server.chat.formats import compose, json_format, regex_format
from qwen_serve.server.engine import SamplingParams
from tests.marks import slow_but
from tests.server.engine.helpers import EXACT, Answer, Question, ask_all, idle, random_prompt, running
from tests.server.engine.inside import at_rest, check_contexts

LONGEST = 150
TURN = (3585, 332, 198, 3608, 258, 3609, 258)
"""What the template has an answer begin with: <|im_start|>assistant, and thinking switched off."""

LISTS = {"type": "array", "items": {"enum": [17, 170, "one", "oneself", None]}, "minItems": 3}
RECORD = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer"}, "of": {"type": "string"}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}
GRAMMARS = [
    compose(format_, thinking=thinking)
    for format_ in (
        json_format(LISTS, "schema"),
        json_format(RECORD, "schema", flexible=False),
        regex_format("([a-f]{3} )+[0-9]", "regex"),
    )
    for thinking in (False, True)
]
"""Few tokens to choose from, many that are forced; or free up to `</think>`."""

SEED = 9


def requests(seed: int) -> list[Question]:
    """Prompts that share beginnings, repeat and diverge; greedy, sampled and penalized answers; some are
    cancelled."""
    rng = random.Random(seed)
    found: list[Question] = []
    for _ in range(12):
        earlier = rng.choice(found).prompt if found else [300]
        words = random_prompt(rng, rng.randint(2, 25))
        prompt = rng.choice(
            [
                earlier,
                [*earlier[: rng.randint(1, len(earlier))], *random_prompt(rng, rng.randint(1, 30))],
                words[:1],
                (words * 20)[: rng.randint(2, 200)],
                [*(words * 60)[: rng.randint(64, 120)], *TURN],
            ]
        )
        leaves = rng.choice([None, None, 1, 20])
        found.append(Question(prompt[:LONGEST], rng.choice([1, 2, 40, 100]), rng.uniform(0, 0.2), leaves))
        found[-1].params = _params(rng)
    for request in found:
        request.grammar = rng.choice([None, None, None, *GRAMMARS])
        if request.grammar is not None:
            request.params = replace(request.params, ignore_eos=False)
    return found


def _params(rng: random.Random) -> SamplingParams:
    seed, ignore = rng.randrange(100), rng.random() < 0.6
    return rng.choice(
        [
            SamplingParams(ignore_eos=ignore),
            SamplingParams(temperature=0.8, top_k=rng.choice([0, 5, 100]), seed=seed, ignore_eos=ignore),
            SamplingParams(temperature=rng.choice([0.0, 0.7]), repetition_penalty=1.2, seed=seed),
        ]
    )


@pytest.fixture(scope="module")
def plain(nano_f32: Path) -> list[Answer]:
    """The answers to the requests one by one, without optimizations."""
    off: dict[str, Any] = {"parallel": 1, "speculation": "off", "prefix_cache": False}
    alone = [replace(one, delay=0.0, cancel_after=None) for one in requests(SEED)]
    with running(nano_f32, **EXACT, **off) as engine:
        return asyncio.run(ask_all(engine, alone))


COMBINATIONS: dict[str, dict[str, Any]] = {
    "short of cells, host tier, deep drafts": {
        "ctx_size": 256,
        "parallel": 6,
        "speculation": "both",
        "draft_always": True,
        "prefix_checkpoints": 2,
        "prefix_host_mib": 3,
        "prefix_interval": 16,
    },
    "device, narrow steps": {
        "parallel": 3,
        "sampling": "device",
        "speculation": "both",
        "draft_max": 20,
        "prefill_budget": 7,
        "batch_size": 64,
        "ubatch_size": 16,
    },
    "drafter, short of cells, host tier": {
        "ctx_size": 320,
        "parallel": 6,
        "speculation": "draft",
        "draft_always": True,
        "draft_window": 24,
        "prefix_checkpoints": 2,
        "prefix_host_mib": 3,
        "prefix_interval": 16,
    },
    "drafter, device": {
        "parallel": 3,
        "sampling": "device",
        "speculation": "draft",
        "draft_always": True,
        "prefill_budget": 7,
        "batch_size": 64,
        "ubatch_size": 16,
    },
    "head only, few rows, few cells": {
        "parallel": 20,
        "speculation": "mtp",
        "draft_window": 8,
        "draft_max": 1,
        "draft_always": True,
        "prefix_cells": 50,
        "prefix_checkpoints": 1,
    },
}
QUICK = ["short of cells, host tier, deep drafts", "drafter, device"]


@pytest.mark.parametrize("combination", slow_but(QUICK, COMBINATIONS))
async def test_answers_stay_and_nothing_is_left(
    combination: str,
    nano_f32: Path,
    nano_draft_f32: Path,
    plain: list[Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qwen_serve.server.engine.prefix_cache.cache.MIN_RESTORE", 32)
    monkeypatch.setattr("qwen_serve.server.engine.request.GROWTH", 1)  # admit more than can end
    beside = {"draft_model": nano_draft_f32} if "drafter" in combination else {}
    with running(nano_f32, **EXACT, **COMBINATIONS[combination], **beside) as engine:
        for again in range(2):
            answers = await ask_all(engine, requests(SEED))
            for number, (request, answer, expected) in enumerate(
                zip(requests(SEED), answers, plain, strict=True)
            ):
                about = f"request {number}, round {again}, {request.params}"
                if request.cancel_after is None:
                    assert answer == expected, about
                else:
                    assert answer.tokens == expected.tokens[: len(answer.tokens)], about
        await idle(engine)
        assert at_rest(engine)
        check_contexts(engine)
        if engine.settings.draft_always:  # else it is the clock that says whether drafts pay
            assert sum(counts.accepted for counts in engine.stats().drafts.values()) > 0
