"""A sequence that runs alone and rolls back to snapshots: answers, states that others start from, and
graphs."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qwen_serve.llamacpp import HAS_OPERANDS
from qwen_serve.server.engine import Engine
from tests.marks import slow_but
from tests.server.engine.helpers import EXACT, Alone, Answer, Question, ask, ask_all, random_prompt, running
from tests.server.engine.inside import draft_by
from tests.server.engine.speculation.test_exactness import Scripted

ALL: dict[str, Any] = {
    **EXACT,
    "draft_always": True,
    "ctx_size": 4096,
    "parallel": 3,
    "prefix_checkpoints": 12,
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "scripted": {"speculation": "ngram", "snapshots": 20},
    "text": {"speculation": "ngram", "snapshots": 6, "draft_max": 6},
    "head": {"speculation": "mtp", "mtp_depth": 3, "snapshots": 3},
    "both": {"speculation": "both", "mtp_depth": 6, "snapshots": 4, "draft_max": 12, "draft_window": 30},
    "on the device": {"speculation": "mtp", "mtp_depth": 4, "snapshots": 4, "sampling": "device"},
}


@pytest.fixture(scope="module")
def reference(nano_f32: Path) -> Iterator[Alone]:
    reference = Alone(nano_f32, **EXACT)
    yield reference
    reference.close()


class Guests:
    """Come alone, go on from what others were told, leave early, and now and then meet each other."""

    def __init__(self, engine: Engine, reference: Alone, seed: str) -> None:
        self.engine, self.reference, self.rng = engine, reference, random.Random(seed)
        self.texts: list[list[int]] = []
        self.scripts: list[list[int]] = []

    def request(self) -> tuple[Question, list[int]]:
        rng = self.rng
        if self.texts and rng.random() < 0.6:
            text = rng.choice(self.texts[-4:])
            text = text[: rng.randint(20, len(text))] if rng.random() < 0.3 else text
            prompt = text[-400:] + random_prompt(rng, rng.randint(1, 20))
        else:
            prompt = random_prompt(rng, rng.randint(1, 120))
        n = rng.randint(1, 50)
        expected = self.reference.greedy(prompt, n)
        self.scripts.append(prompt + expected)
        leaves = rng.randint(1, n) if rng.random() < 0.2 else None
        return Question(prompt, n, delay=rng.uniform(0, 0.05), cancel_after=leaves), expected

    def check(self, request: Question, answer: Answer, expected: list[int]) -> None:
        whole = request.cancel_after is None
        assert answer.tokens == expected[: len(answer.tokens)]
        assert len(answer.tokens) == len(expected) or not whole
        if len(text := request.prompt + answer.tokens) > 20:
            self.texts.append(text)

    async def come(self, n: int) -> None:
        pairs = [self.request() for _ in range(n)]
        answers = await ask_all(self.engine, [request for request, _ in pairs])
        for (request, expected), answer in zip(pairs, answers, strict=True):
            self.check(request, answer, expected)


@pytest.mark.parametrize("drafter", slow_but(["scripted"], DRAFTERS))
async def test_guests_get_what_they_get_alone(drafter: str, nano_f32: Path, reference: Alone) -> None:
    with running(nano_f32, **ALL, **DRAFTERS[drafter]) as engine:
        guests, speculator = Guests(engine, reference, drafter), engine.components.speculator
        assert engine.components.context.n_snapshots
        if drafter == "scripted":
            draft_by(speculator, Scripted(guests.scripts, drafter))
        context: Any = engine.components.context
        materialized, materialize = 0, context._materialize  # noqa: SLF001 - whether it comes to that

        def counted(sequence: int) -> None:
            nonlocal materialized
            materialized += 1
            materialize(sequence)

        context._materialize = counted  # noqa: SLF001 - whether it comes to that
        for n in range(30):
            await guests.come(guests.rng.choice([1, 1, 1, 2, 3]))
            if engine.stats().prefix.hits > 5 and (materialized or n >= 20):
                break
        stats = engine.stats()
    assert stats.prefix.hits > 5
    if drafter in ("scripted", "head", "on the device"):  # the others are seldom wrong at the end
        assert materialized, "nobody was copied, or met, right after going back"
    assert all(counts.accepted for counts in stats.drafts.values())
    assert stats.kv_cells_used == stats.prefix.resident_cells


@pytest.mark.skipif(not HAS_OPERANDS, reason="the build has no patch operand-verification")
@pytest.mark.parametrize("drafter", slow_but(["scripted"], DRAFTERS))
async def test_guests_get_what_they_get_alone_by_operands(
    drafter: str, nano_f32: Path, reference: Alone
) -> None:
    options = {name: value for name, value in DRAFTERS[drafter].items() if name != "snapshots"}
    taken = 0
    with running(nano_f32, **ALL, **options, operands=DRAFTERS[drafter]["snapshots"]) as engine:
        guests, context = Guests(engine, reference, drafter), engine.components.context
        assert context.n_operands and not context.n_snapshots
        if drafter == "scripted":
            draft_by(engine.components.speculator, Scripted(guests.scripts, drafter))
        remove = context.remove

        def counted(sequence: int, start: int = -1, end: int = -1) -> bool:
            nonlocal taken
            taken += start > 0
            return remove(sequence, start, end)

        context.remove = counted  # type: ignore[method-assign] # whether it comes to that
        for _ in range(12):
            await guests.come(guests.rng.choice([1, 2, 3, 3]))
        stats = engine.stats()
    assert taken > 10
    assert stats.prefix.hits > 0
    assert all(counts.accepted for counts in stats.drafts.values())


async def test_drafts_of_one_length_take_one_graph(nano_f32: Path) -> None:
    """Passes that build a graph, beside verifications: none after the first where snapshots suffice."""
    built: dict[int, float] = {}
    prompt = random_prompt(random.Random(1), 30)
    for snapshots in (0, 4):
        with running(
            nano_f32, **ALL, speculation="mtp", mtp_depth=4, snapshots=snapshots, threads_batch=1
        ) as engine:
            context, steps = engine.components.context, engine.stats().steps
            reused = context.graphs_reused
            await ask(engine, Question(prompt, 150))
            steps = engine.stats().steps - steps
            built[snapshots] = (steps - (context.graphs_reused - reused)) / steps
            counts = engine.stats().drafts["mtp"]
            assert counts.accepted < counts.drafted
    assert built[4] < 0.2
    assert built[0] > 0.3
