"""Drafts from earlier answers: right where answers repeat, and never from another tenant's."""

import random
from pathlib import Path

import pytest

from qwen_serve.server.engine import SchedulingParams
from qwen_serve.server.engine.request import PRIVATE, Request
from qwen_serve.server.engine.speculation import DraftRequest
from qwen_serve.server.engine.speculation.earlier import TENANTS, EarlierAnswers
from qwen_serve.server.engine.speculation.ngram import NgramDrafter
from tests.server.engine.helpers import EXACT, Question, ask, random_prompt, running, submit
from tests.server.engine.scheduling import NO_SAMPLER

ANSWER = [*range(500, 540)]


def one(prompt: list[int], tenant: str = "a", salt: str = "") -> Request:
    return Request([*prompt], 100, NO_SAMPLER, salt=salt, scheduling=SchedulingParams(tenant=tenant))


def answered(drafter: NgramDrafter, tenant: str = "a", salt: str = "") -> None:
    sequence = one([1, 2, 3], tenant, salt)
    sequence.tokens += ANSWER
    drafter.forget(sequence)


def draft(drafter: NgramDrafter, sequence: Request, limit: int = 8) -> list[int]:
    [made] = drafter.propose([DraftRequest(sequence, 0, limit)])
    assert made.tokens == [] or made.kind in drafter.kinds
    return made.tokens


def test_what_followed_in_an_earlier_answer_is_drafted_up_to_its_end() -> None:
    drafter = NgramDrafter(16, 4, history=1000)
    answered(drafter)
    sequence = one([9, 8, 7])
    assert draft(drafter, sequence) == []
    sequence.tokens += ANSWER[:5]
    assert draft(drafter, sequence) == ANSWER[5:13]
    sequence.tokens += ANSWER[5:36]
    assert draft(drafter, sequence) == ANSWER[36:], "nothing of what stands behind the answer"
    sequence.tokens += [*ANSWER[36:], 7]
    assert draft(drafter, sequence) == []
    sequence.tokens += ANSWER[10:14]
    assert draft(drafter, sequence, 2) == ANSWER[14:16]


def test_the_own_text_comes_first_where_it_matches_as_much() -> None:
    drafter = NgramDrafter(16, 4, history=1000)
    answered(drafter)
    assert draft(drafter, one([*ANSWER[:3], 77, 78, 79, *ANSWER[:3]]))[:3] == [77, 78, 79]


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        (("a", ""), ("b", "")),
        (("a", "x"), ("a", "y")),
        (("a", "x"), ("b", "x")),
        (("a", PRIVATE + "1"), ("a", PRIVATE + "1")),
        (("a", ""), ("a", PRIVATE + "2")),
    ],
)
def test_nobody_drafts_from_what_is_not_shared_with_him(
    writer: tuple[str, str], reader: tuple[str, str]
) -> None:
    drafter = NgramDrafter(16, 4, history=1000)
    answered(drafter, *writer)
    assert draft(drafter, one([1, *ANSWER[:20]], *reader)) == []


def test_memory_is_bounded() -> None:
    earlier, rng = EarlierAnswers(100), random.Random(0)
    for number in range(3 * TENANTS):
        for _ in range(5):
            earlier.add(one([1], str(number)), "".join(chr(rng.randrange(300, 900)) for _ in range(60)))
        assert len(earlier.of(one([1], str(number)))) == 100
    kept = [number for number in range(3 * TENANTS) if earlier.of(one([1], str(number)))]
    assert kept == [*range(2 * TENANTS, 3 * TENANTS)]
    assert not NgramDrafter(16, 4).kinds.keys() & {"earlier-3"}


async def test_an_answer_that_was_given_before_is_drafted_for_the_same_tenant_only(nano_f32: Path) -> None:
    """Neither drafts nor usage of another tenant show what was written before."""
    prompt = random_prompt(random.Random(5), 40)
    with running(nano_f32, **EXACT, speculation="off") as engine:
        expected = (await ask(engine, Question(prompt, 60))).tokens
    drafted: list[int] = []
    for history in (0, 16_384):
        with running(
            nano_f32, **EXACT, speculation="ngram", draft_always=True, draft_history=history
        ) as engine:
            for tenant in ("a", "b", "a"):
                request = Question(prompt, 60, scheduling=SchedulingParams(tenant=tenant))
                generation = submit(engine, request)
                assert [token async for new in generation for token in new] == expected
                drafted.append(generation.request.drafts.accepted)
    assert drafted[0] == drafted[1] == drafted[2], "without a history"
    assert drafted[3:5] == drafted[:2], "the first answer of each tenant"
    assert drafted[5] > drafted[4] + 10
