"""The prefix cache in the engine: it saves work and changes no answer."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qwen_serve.server.engine import Engine
from qwen_serve.server.engine.prefix_cache.cache import MIN_GAIN, MIN_TURN
from qwen_serve.server.engine.request import DraftCounts
from tests.marks import slow_but
from tests.server.engine.helpers import (
    EXACT,
    Alone,
    Question,
    ask,
    ask_all,
    ask_at_once,
    random_prompt,
    running,
    submit,
)
from tests.server.engine.test_exactness import differ_by_no_more_than_noise


@pytest.fixture
def engine(nano_f32: Path) -> Iterator[Engine]:
    """An engine without drafts, since drafts depend on timing and these tests count steps."""
    with running(nano_f32, **EXACT, ctx_size=8192, speculation="off") as engine:
        yield engine


async def test_the_same_prompt_again_takes_one_decode_step_and_no_prefill(engine: Engine) -> None:
    prompt = random_prompt(random.Random(1), 400)
    first = await ask(engine, Question(prompt, 10))
    before = engine.stats()
    again = await ask(engine, Question(prompt, 10))
    after = engine.stats()
    assert again == first
    assert after.steps - before.steps == 10
    assert after.prompt_tokens - before.prompt_tokens == 1
    assert after.prefix.tokens_saved == 399
    assert after.prefix.hits == 1


async def test_cached_tokens_are_told(engine: Engine) -> None:
    prompt = random_prompt(random.Random(2), 100)
    for cached in (0, 99):
        generation = submit(engine, Question(prompt, 5))
        assert [token async for tokens in generation for token in tokens]
        assert generation.request.cached_tokens == cached


async def test_a_shared_prefix_is_computed_once_however_many_use_it_at_once(engine: Engine) -> None:
    rng = random.Random(3)
    shared = random_prompt(rng, 500)
    requests = [Question([*shared, 256 + n, *random_prompt(rng, 20)], 8) for n in range(12)]
    answers = await ask_at_once(engine, requests)
    stats = engine.stats()
    assert stats.prompt_tokens == 500 + 12 * 21
    assert stats.prefix.tokens_saved == 11 * 500
    assert len({tuple(answer.tokens) for answer in answers}) > 1


async def test_a_longer_text_goes_on_from_the_answer_before(engine: Engine) -> None:
    prompt = random_prompt(random.Random(4), 60)
    answer = await ask(engine, Question(prompt, 40))
    before = engine.stats()
    await ask(engine, Question([*prompt, *answer.tokens, 300, 301, 302], 5))
    assert (
        engine.stats().prompt_tokens - before.prompt_tokens == 4
    )  # the answer's last token was not computed


async def test_switched_off_nothing_is_kept(nano_f32: Path) -> None:
    prompt = random_prompt(random.Random(5), 100)
    with running(nano_f32, **EXACT, prefix_cache=False) as engine:
        answers = [await ask(engine, Question(prompt, 10)) for _ in range(2)]
        stats = engine.stats()
    assert answers[0] == answers[1]
    assert stats.prompt_tokens == 200
    assert (stats.kv_cells_used, stats.prefix.resident, stats.prefix.hits) == (0, 0, 0)


# --- the same answers --------------------------------------------------------------------------------------


def mixture(rng: random.Random, count: int, longest: int) -> list[Question]:
    """Prompts that share beginnings, diverge, repeat and continue others; some are cancelled."""
    stems = [random_prompt(rng, rng.randint(30, 120)) for _ in range(3)]
    requests: list[Question] = []
    for _ in range(count):
        stem = rng.choice(stems)
        kind = rng.randrange(4)
        if kind == 0 and requests:
            prompt = list(rng.choice(requests).prompt)
        elif kind == 1 and requests:
            earlier = rng.choice(requests).prompt
            prompt = [*earlier[: rng.randint(1, len(earlier))], *random_prompt(rng, rng.randint(1, 30))]
        else:
            prompt = [*stem, *random_prompt(rng, rng.randint(1, 60))]
        gone = rng.randint(1, 15) if rng.random() < 0.2 else None
        requests.append(Question(prompt, rng.randint(1, longest), rng.uniform(0, 0.4), cancel_after=gone))
    return requests


ALL = {"ctx_size": 8192, "prefix_checkpoints": 150, "prefix_cells": 8192}
"""Room for everything that the requests below leave."""

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "roomy": {**ALL, "parallel": 6},
    "drafting": {"ctx_size": 4096, "parallel": 4, "speculation": "both", "prefix_checkpoints": 3},
    "few ids": {"ctx_size": 4096, "parallel": 4, "prefix_checkpoints": 3, "prefix_interval": 32},
    "few cells": {"ctx_size": 4096, "parallel": 4, "prefix_cells": 200, "prefill_budget": 20},
    "preempted": {"ctx_size": 512, "parallel": 6, "prefix_interval": 64, "speculation": "both"},
    "host": {"ctx_size": 1024, "parallel": 3, "prefix_checkpoints": 2, "prefix_host_mib": 4},
    "host, drafting": {
        "ctx_size": 1024,
        "parallel": 3,
        "prefix_checkpoints": 2,
        "prefix_host_mib": 4,
        "speculation": "both",
        "draft_always": True,
    },
    "short steps": {**ALL, "parallel": 4, "prefill_budget": 48},
    "as on a GPU": {
        "ctx_size": 4096,
        "parallel": 4,
        "prefix_checkpoints": 8,
        "prefix_min_tokens": MIN_TURN,
        "speculation": "both",
    },
}


@pytest.mark.parametrize("configuration", slow_but(["few ids"], CONFIGURATIONS))
async def test_answers_are_those_without_the_cache(
    configuration: str, nano_f32: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qwen_serve.server.engine.prefix_cache.cache.MIN_RESTORE", 32)
    rng = random.Random(configuration)
    settings = CONFIGURATIONS[configuration]
    keeps_all = ALL.items() <= settings.items()
    count, longest = (8, 130) if configuration == "preempted" else (20, 25)
    requests = mixture(rng, count, longest)
    one, two, three = (Question(random_prompt(rng, 170), 20) for _ in range(3))
    wide = [Question(random_prompt(rng, 190), 130) for _ in range(2)]
    known = greedy_alone(nano_f32, [*requests, one, two, three, *wide])
    with running(nano_f32, **EXACT, **settings) as engine:
        for again in range(2):
            answers = await ask_all(engine, requests)
            for request, answer in zip(requests, answers, strict=True):
                expected = known[tuple(request.prompt)][: request.max_tokens]
                if request.cancel_after is None:
                    assert answer.tokens == expected, f"{len(request.prompt)} prompt tokens, round {again}"
                else:
                    assert answer.tokens == expected[: len(answer.tokens)]
        stats = engine.stats()
        assert stats.kv_cells_used == stats.prefix.resident_cells
        assert stats.preemptions == 0 or configuration == "preempted"
        if keeps_all:
            finished = [r for r in requests if r.cancel_after is None and len(r.prompt) > MIN_GAIN]
            assert stats.prefix.hits >= len(finished), "the second time, each is found"
            assert stats.prefix.evictions == 0

        # what was reused so far depends on who came when; from here on it does not
        for request in (one, one):
            assert (await ask(engine, request)).tokens == known[tuple(request.prompt)]
        assert engine.stats().prefix.hits == stats.prefix.hits + 1
        if "prefix_host_mib" in settings:
            for request in (two, three, one):
                assert (await ask(engine, request)).tokens == known[tuple(request.prompt)]
            assert engine.stats().prefix.restores > stats.prefix.restores
        if configuration == "preempted":  # they fit beside each other as they come, but not as they grow
            for request, answer in zip(wide, await ask_at_once(engine, wide), strict=True):
                assert answer.tokens == known[tuple(request.prompt)]
            assert engine.stats().preemptions > stats.preemptions
        stats = engine.stats()
    assert stats.kv_cells_used == stats.prefix.resident_cells
    assert stats.prefix.evictions > 0 or keeps_all


def greedy_alone(model: Path, requests: list[Question]) -> dict[tuple[int, ...], list[int]]:
    """The longest answer that any request with a prompt gets, by prompt."""
    reference = Alone(model, **EXACT)
    known: dict[tuple[int, ...], list[int]] = {}
    for request in sorted(requests, key=lambda request: -request.max_tokens):
        if tuple(request.prompt) not in known:
            known[tuple(request.prompt)] = reference.greedy(request.prompt, request.max_tokens)
    reference.close()
    return known


@pytest.mark.slow
async def test_a_checkpoint_from_the_host_drafts_as_one_that_stayed(nano_f32: Path) -> None:
    rng = random.Random(9)
    one, *others = (Question(random_prompt(rng, 300), 60) for _ in range(3))
    only_the_head = {"speculation": "mtp", "draft_always": True}
    with running(
        nano_f32, **EXACT, **only_the_head, prefix_checkpoints=2, prefix_host_mib=8, parallel=1
    ) as engine:

        async def drafts(request: Question) -> tuple[list[int], DraftCounts]:
            before = engine.stats().drafts["mtp"]
            answer = await ask(engine, request)
            after = engine.stats().drafts["mtp"]
            counts = (getattr(after, name) - getattr(before, name) for name in DraftCounts.__slots__)
            return answer.tokens, DraftCounts(*counts)

        first, _ = await drafts(one)
        stayed, counts = await drafts(one)
        for other in others:
            await drafts(other)
        assert engine.stats().prefix.restores == 0
        came_back, same_counts = await drafts(one)
        assert engine.stats().prefix.restores == 1
    assert first == stayed == came_back
    assert counts.accepted > 0
    assert same_counts == counts


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["q4_k_m"])
async def test_in_other_types_they_differ_by_no_more_than_the_noise_of_shapes(
    quant: str, request: pytest.FixtureRequest
) -> None:
    rng = random.Random(7)
    stem = random_prompt(rng, 150)
    prompts = [stem, [*stem, *random_prompt(rng, 30)], [*stem[:90], *random_prompt(rng, 50)], list(stem)]
    types = {"flash_attn": "auto", "cache_type_k": "f16", "cache_type_v": "f16"}
    await differ_by_no_more_than_noise(request.getfixturevalue(f"nano_{quant}"), types, prompts, "both")
