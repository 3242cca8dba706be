"""The MTP head drafts for many requests at once, and each has the answer that it has alone."""

import random
from pathlib import Path
from typing import Any

import pytest

from qwen_serve.server.engine import SamplingParams
from tests.marks import slow_but
from tests.server.engine.helpers import EXACT, Question, ask, ask_all, random_prompt, running
from tests.server.engine.speculation.fake_head import Head
from tests.server.engine.speculation.test_mtp import draft, drafter, rows
from tests.server.engine.speculation.test_mtp import running as text

CROWDS: dict[str, tuple[int, dict[str, Any]]] = {
    "8": (8, {"draft_always": True, "mtp_depth": 4}),
    "8, longer than operands reach": (8, {"draft_always": True, "mtp_depth": 6, "operands": 4}),
    "16": (16, {"draft_always": True, "mtp_depth": 3, "prefix_cache": False}),
    "16, without an unequal pass": (16, {"draft_always": True, "mtp_depth": 2, "ubatch_size": 32}),
    "16, what pays": (16, {}),
    "16, a narrow window": (16, {"draft_always": True, "draft_window": 9, "batch_size": 64}),
    "8 of 16 draft": (16, {"draft_always": True, "draft_parallel": 8}),
}


@pytest.mark.parametrize("crowd", slow_but(["8"], CROWDS))
async def test_many_draft_at_once_and_no_answer_changes(crowd: str, nano_f32: Path) -> None:
    """Greedy ones and seeded draws beside others that are cancelled."""
    n, settings = CROWDS[crowd]
    rng = random.Random(crowd)
    requests = []
    for number in range(n):
        params = SamplingParams(ignore_eos=True)
        if number % 2:
            params = SamplingParams(
                temperature=0.8, top_k=20, top_p=0.95, seed=number, repetition_penalty=1.05, ignore_eos=True
            )
        prompt = random_prompt(rng, rng.choice([1, 9, 30, 70, 120]))
        requests.append(Question(prompt, rng.randint(20, 50), rng.uniform(0, 0.2), params=params))
    cancelled = [
        Question(
            random_prompt(rng, rng.randint(1, 90)), 60, rng.uniform(0, 0.5), cancel_after=rng.randint(1, 20)
        )
        for _ in range(n // 2)
    ]
    with running(
        nano_f32, **EXACT, parallel=1, ctx_size=1024, speculation="off", sampling="device"
    ) as engine:
        expected = [await ask(engine, request) for request in requests]
    sizes = {
        "parallel": n,
        "ctx_size": 512 * n,
        "sampling": "device",
        "speculation": "mtp",
        "draft_parallel": 32,
    }
    with running(nano_f32, **EXACT, **(sizes | settings)) as engine:
        found = await ask_all(engine, [*requests, *cancelled])
        stats = engine.stats()
    assert found[:n] == expected
    assert (stats.running, stats.waiting) == (0, 0)
    counts = stats.drafts["mtp"]
    assert counts.failed == 0
    if settings.get("draft_always"):
        assert counts.accepted
        assert counts.steps > n or "draft_parallel" in settings


@pytest.mark.parametrize("widest", [0, 5])
def test_many_draft_in_one_pass_for_each_token(widest: int) -> None:
    """Each at its own position, after reading as many rows as it has not read."""
    head = Head()
    mtp = drafter(head, widest=widest)
    texts = [text(list(range(100 * slot, 100 * slot + 3 + slot)), slot) for slot in range(3)]
    for one in texts:
        mtp.collect(one.slot or 0, 0, rows(0, len(one.tokens) - 1))
    guesses = draft(mtp, *((one, 1 + (one.slot or 0)) for one in texts))
    assert guesses == [[one.tokens[-1] + 1 + i for i in range(1 + (one.slot or 0))] for one in texts]
    assert head.widths == [12 if widest else 9, 3, 3], "the first pass has a row more than tokens are drafted"
    for one in texts:
        head.check(one.slot or 0, one.tokens)
        assert sorted(head.entries[one.slot or 0]) == list(range(1, len(one.tokens)))
    head.widths.clear()
    for one, accepted in zip(texts, (1, 0, 3), strict=True):
        start = len(one.tokens) - 1
        mtp.collect(one.slot or 0, start, rows(start, 1 + accepted))
        one.tokens += [*guesses[one.slot or 0][:accepted], 7]
    assert draft(mtp, *((one, 2) for one in texts)) == [[8, 9]] * 3
    assert head.widths == [9 if widest else 7, 3]
    for one in texts:
        head.check(one.slot or 0, one.tokens)


def test_long_prompts_of_many_are_read_before_the_first_guess() -> None:
    head = Head()
    mtp = drafter(head)
    texts = [text(list(range(20 + slot)), slot) for slot in range(3)]
    for one in texts:
        mtp.collect(one.slot or 0, 0, rows(0, len(one.tokens) - 1))
    assert draft(mtp, *((one, 2) for one in texts)) == [[20, 21], [21, 22], [22, 23]]
    assert head.widths == [16, 16, 16, 9, 3, 3]
    for one in texts:
        head.check(one.slot or 0, one.tokens)
