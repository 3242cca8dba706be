"""Consecutive decode steps: parts of a batch that are reused, and events that end the reuse."""

import random
from pathlib import Path

import numpy as np
import pytest

from qwen_serve.llamacpp import Context
from qwen_serve.llamacpp.row_results import RowResults, Status
from qwen_serve.llamacpp.row_steps import RowSteps
from qwen_serve.server.engine import GenerateRequest, SamplingParams
from qwen_serve.server.engine.batch import Batch
from qwen_serve.server.engine.runner import Runner
from tests.server.engine.helpers import (
    EXACT,
    Alone,
    Question,
    ask_all,
    random_prompt,
    running,
    standing_still,
)
from tests.server.engine.scheduling import advance, commit, scheduler, sequence


def test_the_same_sequences_are_not_scheduled_anew() -> None:
    s = scheduler(slots=2)
    s.add(one := sequence(4, max_tokens=10))
    s.add(two := sequence(4, max_tokens=10))
    advance(s)
    steps = [advance(s) for _ in range(5)]
    assert all(step is steps[0] for step in steps)
    assert (one.generated, two.generated) == (6, 6)


def test_who_comes_is_taken_in_at_once() -> None:
    s = scheduler(slots=2)
    s.add(one := sequence(4, max_tokens=20))
    for _ in range(4):
        advance(s)
    s.add(two := sequence(4, max_tokens=20))
    assert two in [chunk.sequence for _ in range(2) for chunk in advance(s).chunks]
    step = advance(s)
    assert [chunk.sequence for chunk in step.chunks] == [one, two]
    assert advance(s) is step


def test_who_waits_for_a_slot_changes_nothing_until_one_is_free() -> None:
    s = scheduler(slots=1)
    s.add(one := sequence(4, max_tokens=20))
    for _ in range(3):
        advance(s)
    step = advance(s)
    s.add(two := sequence(4, max_tokens=20))
    assert advance(s) is step
    s.remove(one)
    assert [chunk.sequence for chunk in advance(s).chunks] == [two]


def test_who_has_gone_is_in_no_step() -> None:
    s = scheduler(slots=2)
    s.add(one := sequence(4, max_tokens=20))
    s.add(two := sequence(4, max_tokens=20))
    for _ in range(4):
        advance(s)
    s.remove(one)
    assert [chunk.sequence for chunk in advance(s).chunks] == [two]


def test_a_draft_makes_another_batch_of_it() -> None:
    s = scheduler(slots=1)
    s.add(sequence(4, max_tokens=50))
    for _ in range(3):
        advance(s)
    batch = s.schedule()
    assert batch.is_decode
    batch.add_draft(batch.chunks[0], [7, 8])
    assert not batch.is_decode
    commit(s, batch)
    following = s.schedule()
    assert following is not batch
    assert [chunk.draft for chunk in following.chunks] == [()]
    assert following.is_decode


def test_a_draft_that_is_dropped_leaves_the_batch_as_it_was() -> None:
    s = scheduler(slots=1)
    s.add(one := sequence(4, max_tokens=50))
    for _ in range(3):
        advance(s)
    batch = s.schedule()
    batch.add_draft(batch.chunks[0], [7, 8])
    batch.drop_drafts()
    commit(s, batch)
    again = s.schedule()
    assert again is batch
    assert (again.chunks[0].start, again.n_tokens) == (one.computed, 1)


def test_when_cells_run_short_the_youngest_goes_as_ever() -> None:
    s = scheduler(slots=2, cells=160, batch=64, budget=64)
    s.add(old := sequence(10, max_tokens=140))
    s.add(sequence(10, max_tokens=140))
    while not s.preemptions:
        step = advance(s)
    assert [chunk.sequence for chunk in step.chunks] == [old]


async def test_what_is_taken_over_is_what_would_be_written_anew(
    nano_f32: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch equals one that is built from the sequences, while requests join and leave."""
    seen = {"taken over": 0, "anew": 0}
    fill = Runner._fill  # noqa: SLF001 - looked at between its two ways

    def checked(self: Runner, batch: Batch, behind: None) -> None:
        again = batch is self._filled
        seen["taken over" if again else "anew"] += 1
        fill(self, batch, behind)
        if again:
            _compare(self._context, batch)

    monkeypatch.setattr(Runner, "_fill", checked)
    rng = random.Random(11)
    warm = SamplingParams(temperature=0.8, seed=5, ignore_eos=True)
    requests = [
        Question(random_prompt(rng, rng.randint(1, 60)), rng.randint(1, 60), rng.uniform(0, 0.5))
        for _ in range(12)
    ]
    requests += [
        Question(random_prompt(rng, 20), 30, 0.1, params=warm),
        Question(random_prompt(rng, 30), 80, 0.2, cancel_after=9),
    ]
    with running(nano_f32, **EXACT, parallel=5, speculation="off") as engine:
        answers = await ask_all(engine, requests)
    assert min(seen.values()) > 10
    reference = Alone(nano_f32, **EXACT)
    for request, answer in zip(requests, answers, strict=True):
        if request.params is not warm:
            expected = reference.greedy(request.prompt, request.max_tokens)
            assert answer.tokens == expected[: len(answer.tokens)]
            assert request.cancel_after or len(answer.tokens) == request.max_tokens
    reference.close()


def _compare(context: Context, batch: Batch) -> None:
    n, sequences = batch.n_tokens, [chunk.sequence for chunk in batch.chunks]
    assert n == len(sequences)
    assert context.tokens[:n].tolist() == [one.tokens[one.computed] for one in sequences]
    assert context.positions[:n].tolist() == [one.computed for one in sequences]
    assert context.sequences[:n].tolist() == [one.slot for one in sequences]
    assert np.all(context.outputs[:n] == 1)
    assert [placement.rows for placement in batch.placements] == [[row] for row in range(n)]


async def test_a_greedy_row_that_is_no_number_is_computed_again(
    nano_f32: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that stays so: test_usable_logits."""
    results, warm, spoilt = RowSteps.results, False, False

    def spoil(self: RowSteps) -> RowResults:
        nonlocal spoilt
        found = results(self)
        if warm and len(found) == 2 and not spoilt:
            found.statuses[0] = Status.NOT_FINITE
            spoilt = True
        return found

    monkeypatch.setattr(RowSteps, "results", spoil)
    rng = random.Random(12)
    prompts = [random_prompt(rng, 20), random_prompt(rng, 20)]
    params = SamplingParams(ignore_eos=True)
    with running(nano_f32, **EXACT, parallel=2, speculation="off") as engine:
        warm = True
        with standing_still(engine):
            generations = [
                engine.submit(GenerateRequest(engine.prompt(prompt), params, 30)) for prompt in prompts
            ]
        answers = [[token async for new in one for token in new] for one in generations]
    assert spoilt
    reference = Alone(nano_f32, **EXACT)
    assert answers == [reference.greedy(prompt, 30) for prompt in prompts]
    reference.close()
