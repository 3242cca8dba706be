"""Constrained answers: choices from parts of a row equal those from the whole row, whatever else runs and
whatever is drafted, preempted or forced."""

import asyncio
import random
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from qwen_serve.llamacpp.row_sampler import Bits
from qwen_serve.server.engine import Engine, GenerateRequest, SamplingParams
from qwen_serve.server.engine.sampling import Sampler
from qwen_serve.server.engine.sampling.constraint import Constraint, Mask
from qwen_serve.server.engine.vocab import Vocab
from tests.marks import slow_but
from tests.server.engine.helpers import EXACT, Alone, random_prompt, running, standing_still
from tests.server.engine.sampling.constraints import Fickle, packed
from tests.server.engine.sampling.fake_rows import SmallVocab, choose

N = 48
PROMPTS = [random_prompt(random.Random(i), length) for i, length in enumerate((3, 40, 150, 7))]
DRAWN = SamplingParams(temperature=1.0, top_k=20, top_p=0.8, seed=5, ignore_eos=True)
GREEDY = SamplingParams(ignore_eos=True)


def alone(model: Path, prompt: list[int], constraint: Fickle) -> list[int]:
    """The expected answer: the best allowed token, one at a time, with forced tokens added."""
    reference = Alone(model, **EXACT)
    answer, read = constraint.forced(), 0
    while len(answer) < N:
        tokens = [*prompt, *answer]
        row, read = reference.rows(tokens, read, len(tokens))[-1], len(tokens)
        ids = np.flatnonzero(constraint.mask()[: row.size])
        answer.append(int(ids[row[ids].argmax()]))
        assert constraint.accept(answer[-1])
        answer += constraint.forced()
    reference.close()
    return answer[:N]


@pytest.fixture(scope="module")
def expected(nano_f32: Path) -> list[list[int]]:
    return [alone(nano_f32, prompt, Fickle(3712, seed=i)) for i, prompt in enumerate(PROMPTS)]


async def answers(
    engine: Engine, params: SamplingParams, constraints: list[Fickle | None], *, stream: bool = True
) -> list[list[int]]:
    async def one(i: int, constraint: Fickle | None) -> list[int]:
        prompt = engine.prompt(PROMPTS[i % len(PROMPTS)])
        generation = engine.submit(GenerateRequest(prompt, params, N, constraint=constraint, stream=stream))
        return [token async for new in generation for token in new]

    return list(await asyncio.gather(*(one(i, constraint) for i, constraint in enumerate(constraints))))


MIXES: dict[str, dict[str, Any]] = {
    "plain": {"speculation": "off"},
    "one place": {"parallel": 1, "speculation": "off"},
    "drafts": {"speculation": "ngram", "draft_always": True},
    "too few cells": {"ctx_size": 300, "speculation": "off"},
    "in the graph": {"sampling": "device", "speculation": "off"},
    "in the graph, with drafts": {"sampling": "device", "speculation": "ngram", "draft_always": True},
    "in the graph, tiny chunks": {"sampling": "device", "prefill_budget": 9, "ubatch_size": 16},
}


@pytest.mark.parametrize("mix", slow_but(["drafts", "too few cells", "in the graph, tiny chunks"], MIXES))
async def test_greedy_is_the_best_of_what_is_allowed(
    mix: str, nano_f32: Path, expected: list[list[int]]
) -> None:
    with running(nano_f32, **EXACT, **MIXES[mix]) as engine:
        for stream in (True, False):
            constraints = [Fickle(3712, seed=i) for i in range(len(PROMPTS))]
            assert await answers(engine, GREEDY, [*constraints], stream=stream) == expected


@pytest.mark.parametrize("share", slow_but([0.02], [0.3, 0.02]))
async def test_draws_from_the_device_are_those_from_whole_rows(nano_f32: Path, share: float) -> None:
    found = []
    for sampling in ("host", "device"):
        constraints = [Fickle(3712, share, seed=i) for i in range(4)]
        with running(nano_f32, **EXACT, sampling=sampling, speculation="off") as engine:
            found.append(await answers(engine, DRAWN, [*constraints]))
    assert found[0] == found[1]


async def test_a_row_of_an_earlier_pass_is_not_computed_again(nano_f32: Path) -> None:
    """Forced tokens give chunks of different lengths, which llama.cpp computes in several passes."""
    expected = [alone(nano_f32, prompt, Fickle(3712, 0.005, 3, seed=i)) for i, prompt in enumerate(PROMPTS)]
    with running(nano_f32, **EXACT, sampling="device", speculation="off") as engine:
        constraints = [Fickle(3712, 0.005, 3, seed=i) for i in range(4)]
        assert await answers(engine, GREEDY, [*constraints]) == expected
        assert engine.stats().preemptions == 0


async def test_mates_do_not_notice(nano_f32: Path) -> None:
    """Some requests are constrained, some are not, some disconnect; those without a constraint get the
    answers that they get alone."""
    reference = Alone(nano_f32, **EXACT)
    plain = [reference.greedy(prompt, N) for prompt in PROMPTS]
    reference.close()
    for sampling in ("host", "device"):
        with running(nano_f32, **EXACT, sampling=sampling, parallel=8) as engine:
            mixed = [None, Fickle(3712), None, Fickle(3712, 0.02), None, Fickle(3712), None, None]
            with standing_still(engine):
                leaving = [
                    engine.submit(
                        GenerateRequest(engine.prompt(PROMPTS[i]), GREEDY, N, constraint=Fickle(3712, seed=9))
                    )
                    for i in range(3)
                ]
                asked = asyncio.create_task(answers(engine, GREEDY, mixed))
                await asyncio.sleep(0)
            async for _ in leaving[0]:
                break
            for generation in leaving:
                generation.cancel()
            for i, answer in enumerate(await asked):
                if mixed[i] is None:
                    assert answer == plain[i % len(PROMPTS)]


class Choice:
    """A constraint that allows one fixed text and then the end."""

    def __init__(self, tokens: list[int]) -> None:
        self.left = tokens

    def forced(self) -> list[int]:
        tokens, self.left = self.left, []
        return tokens

    def accept(self, token: int) -> bool:
        raise AssertionError("there is nothing to choose")

    mask = validate = masks = accept


async def test_an_answer_that_is_forced_to_its_end_takes_no_step(nano_f32: Path) -> None:
    with running(nano_f32, **EXACT) as engine:
        end = min(engine.vocab.eog_ids)
        steps = engine.stats().steps
        for stream in (True, False):
            constraint = cast("Constraint", Choice([300, 301, 302, end]))
            generation = engine.submit(
                GenerateRequest(engine.prompt([5, 6]), GREEDY, constraint=constraint, stream=stream)
            )
            assert [token async for new in generation for token in new] == [300, 301, 302]
            assert generation.finish_reason == "stop"
        short = engine.submit(
            GenerateRequest(
                engine.prompt([5, 6]), GREEDY, 2, constraint=cast("Constraint", Choice([300, 301, 302, end]))
            )
        )
        assert [token async for new in short for token in new] == [300, 301]
        assert short.finish_reason == "length"
        assert engine.stats().steps == steps


async def test_forced_tokens_take_no_steps(nano_f32: Path) -> None:
    with running(nano_f32, **EXACT, speculation="off") as engine:
        before = engine.stats().steps
        [answer] = await answers(engine, GREEDY, [Fickle(3712, every=2)])
        assert len(answer) == N
        assert engine.stats().steps - before < 0.6 * N


async def test_what_a_constraint_raises_fails_its_request_alone(nano_f32: Path) -> None:
    class Raises(Fickle):
        def accept(self, token: int) -> bool:
            raise ValueError("out of fuel")

    with running(nano_f32, **EXACT) as engine:
        bad = engine.submit(
            GenerateRequest(engine.prompt(PROMPTS[0]), GREEDY, N, constraint=Raises(3712, every=10**9))
        )
        good = engine.submit(GenerateRequest(engine.prompt(PROMPTS[1]), GREEDY, N))
        with pytest.raises(Exception, match="out of fuel"):
            _ = [new async for new in bad]
        assert len([token async for new in good for token in new]) == N


# --- the sampler alone -------------------------------------------------------------------------------------


class Fixed(Choice):
    """A constraint with a fixed mask."""

    def __init__(self, mask: Mask) -> None:
        super().__init__([])
        self._mask = mask

    def accept(self, token: int) -> bool:
        return bool(self._mask[token])

    def validate(self, tokens: list[int]) -> int:  # type: ignore[override]
        return next((n for n, token in enumerate(tokens) if not self.accept(token)), len(tokens))

    def mask(self) -> Mask:  # type: ignore[override]
        return self._mask.copy()

    def masks(self, draft: list[int]) -> list[Bits]:  # type: ignore[override]
        return [packed(self._mask)] * (len(draft) + 1)


def by_the_book(params: SamplingParams, logits: np.ndarray[Any, Any], allowed: Mask) -> int:
    """The choice of a sampler without a constraint, from a row in which all other tokens are impossible."""
    sampler = Sampler(params, cast("Vocab", SmallVocab()), [1])
    token = choose(sampler, np.where(allowed, logits, np.float32(-1e30)))
    sampler.close()
    return token


@pytest.mark.parametrize("share", [0.9, 0.05, 0.003])
@pytest.mark.parametrize("native", [True, False])
def test_the_choice_is_that_of_a_row_without_the_others(
    share: float, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With our sampler, and with the one in numpy."""
    if not native:
        monkeypatch.setattr("qwen_serve.llamacpp.host_sampler.HAS_ROW_SAMPLER", False)
    rng = np.random.default_rng(7)
    for trial in range(100):
        logits = np.full(1024, -1e9, np.float32)
        logits[:1000] = rng.normal(0, 3, 1000)
        bits = np.zeros(1024, bool)
        bits[:1000] = rng.random(1000) < share
        bits[rng.integers(0, 999)] = True
        params = SamplingParams(
            temperature=0.0 if trial % 4 == 0 else float(rng.choice([0.3, 1.0, 2.0])),
            top_k=0 if trial % 4 == 0 else int(rng.choice([1, 5, 20, 63])),
            top_p=float(rng.choice([0.5, 0.95, 1.0])),
            min_p=float(rng.choice([0.0, 0.05])),
            seed=trial,
            ignore_eos=bool(trial % 3 == 0),
        )
        expected = by_the_book(params, logits, bits)
        sampler = Sampler(params, cast("Vocab", SmallVocab()), [1], cast("Constraint", Fixed(bits)))
        assert choose(sampler, logits) == expected, (trial, params)
        assert bits[expected]
        sampler.close()
