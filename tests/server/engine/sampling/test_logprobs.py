"""Log-probabilities of tokens equal those of the model alone, with other requests and with drafts."""

import dataclasses
import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from qwen_serve.server.engine import Engine, GenerateRequest, Generation, SamplingParams, ThinkingLimits
from qwen_serve.server.engine.sampling.logprobs import Logprobs
from tests.logits import log_softmax
from tests.marks import slow_but
from tests.server.engine.helpers import (
    EXACT,
    Alone,
    Question,
    ask_all,
    ask_at_once,
    idle,
    random_prompt,
    running,
    submit,
)
from tests.server.engine.sampling.constraints import Fickle

TOP = 20
CLOSE = 2e-4
"""The most that a log-probability in F32 moves with the shape of a batch; they are around -8 in nano."""

MIXES: dict[str, dict[str, Any]] = {
    "plain": {"speculation": "off"},
    "drafts": {"speculation": "both", "draft_always": True},
    "tiny chunks": {"prefill_budget": 7, "ubatch_size": 16},
    "sampled in the graph": {"sampling": "device", "draft_always": True},
    "no room for all at once": {"ctx_size": 512},
}


class Reference:
    """Log-probabilities of the model alone, for every token of a text in one pass."""

    def __init__(self, path: Path) -> None:
        self._alone = Alone(path, **EXACT)
        self._alone.eog = []  # nothing is banned in the model's own distribution
        self.n_real, self._alone.n_real = self._alone.n_real, self._alone.model.n_vocab

    def of(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        """[len(tokens), n_vocab]: log-probabilities of the next token after each token."""
        return np.stack([log_softmax(row) for row in self._alone.logits(tokens, chunk=512)])

    def close(self) -> None:
        self._alone.close()


@pytest.fixture(scope="module")
def reference(nano_f32: Path) -> Any:
    found = Reference(nano_f32)
    yield found
    found.close()


async def tokens_of(generation: Generation) -> list[int]:
    return [token async for tokens in generation for token in tokens]


def check(reference: Reference, prompt: list[int], answer: list[int], logprobs: Logprobs) -> None:
    """Check each token's log-probability, its rank and the most likely tokens, in prompt and answer, against
    the model's."""
    rows = reference.of([*prompt, *answer])
    found = [*logprobs.prompt, *logprobs.tokens]
    expected = [*prompt[1:], *answer] if logprobs.of_prompt else answer
    rows = rows if logprobs.of_prompt else rows[len(prompt) - 1 :]
    assert [entry.token for entry in found] == expected
    for row, entry in zip(rows, found, strict=False):
        assert entry.logprob == pytest.approx(row[entry.token], abs=CLOSE)
        row = row[: reference.n_real]  # what only pads the vocabulary has no rank
        assert abs(entry.rank - 1 - np.count_nonzero(row > row[entry.token] + CLOSE)) <= np.count_nonzero(
            np.abs(row - row[entry.token]) <= CLOSE
        )
        assert len(entry.top) == TOP
        best = np.sort(row)[::-1][:TOP]
        assert [value for _, value in entry.top] == pytest.approx(best.tolist(), abs=CLOSE)
        assert [value for _, value in entry.top] == pytest.approx([row[i] for i, _ in entry.top], abs=CLOSE)


@pytest.mark.parametrize("mix", slow_but(["drafts"], MIXES))
async def test_they_are_the_models_own(mix: str, nano_f32: Path, reference: Reference) -> None:
    rng = random.Random(mix)
    prompts = [random_prompt(rng, length) for length in (1, 2, 3, 40, 150, 230)]
    prompts.append((prompts[3] * 4)[:120])  # something to draft from, and to find in the cache
    sampled = SamplingParams(
        temperature=0.7, top_k=30, seed=5, repetition_penalty=1.1, logprobs=TOP, prompt_logprobs=TOP
    )
    greedy = SamplingParams(logprobs=TOP, prompt_logprobs=TOP, ignore_eos=True)
    with running(nano_f32, **EXACT, **MIXES[mix]) as engine:
        noise = [Question(random_prompt(rng, 60), 40, params=SamplingParams(ignore_eos=True))]
        for params in (greedy, sampled):
            generations = [submit(engine, Question(prompt, 24, params=params)) for prompt in prompts]
            await ask_all(engine, noise)
            for prompt, generation in zip(prompts, generations, strict=True):
                answer = await tokens_of(generation)
                logprobs = generation.request.logprobs
                assert logprobs is not None
                if generation.finish_reason == "stop":
                    answer.append(logprobs.tokens[-1].token)
                    assert answer[-1] in engine.vocab.eog_ids
                check(reference, prompt, answer, logprobs)
                assert generation.request.cached_tokens == 0
        assert engine.stats().running == 0


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(logprobs=TOP),
        SamplingParams(logprobs=TOP, ignore_eos=True),
        SamplingParams(logprobs=TOP, ignore_eos=True, temperature=0.9, top_k=20, seed=4),
    ],
)
async def test_where_rows_are_sampled(nano_f32: Path, reference: Reference, params: SamplingParams) -> None:
    """Tokens do not change, with drafts and other requests."""
    rng = random.Random(11)
    prompts = [random_prompt(rng, length) for length in (1, 40, 150)]
    prompts.append(random_prompt(rng, 12) * 8)
    plain = dataclasses.replace(params, logprobs=None)
    with running(nano_f32, **EXACT, sampling="device", speculation="ngram", draft_always=True) as engine:
        without = await ask_at_once(engine, [Question(prompt, 40, params=plain) for prompt in prompts])
        generations = [submit(engine, Question(prompt, 40, params=params)) for prompt in prompts]
        answers = [await tokens_of(generation) for generation in generations]
        assert answers == [answer.tokens for answer in without]
        for prompt, answer, generation in zip(prompts, answers, generations, strict=True):
            told = generation.request.logprobs
            assert told is not None
            if generation.finish_reason == "stop":
                answer.append(told.tokens[-1].token)
            check(reference, prompt, answer, told)
        assert sum(generation.request.drafts.accepted for generation in generations) > 0


@pytest.mark.parametrize(
    ("sampling", "draft_always"),
    slow_but([("device", True)], itertools.product(("host", "device"), (False, True))),
)
async def test_of_a_bridge_out_of_the_thoughts(
    nano_f32: Path, reference: Reference, sampling: str, draft_always: bool
) -> None:
    """Forced tokens need not be likely."""
    prompt = random_prompt(random.Random(13), 30) * 3
    bridge = (300, 301, 3609, 302)
    params = SamplingParams(logprobs=TOP, ignore_eos=True)
    with running(
        nano_f32, **EXACT, sampling=sampling, speculation="ngram", draft_always=draft_always
    ) as engine:
        generation = engine.submit(
            GenerateRequest(engine.prompt(prompt), params, 60, thinking=ThinkingLimits(bridge, 17))
        )
        answer = await tokens_of(generation)
        assert tuple(answer[17:21]) == bridge
        assert len(answer) == 60
        assert generation.request.logprobs is not None
        assert max(entry.rank for entry in generation.request.logprobs.tokens[17:21]) > TOP
        check(reference, prompt, answer, generation.request.logprobs)


async def test_drafts_are_accepted_beside_them(nano_f32: Path, reference: Reference) -> None:
    prompt = random_prompt(random.Random(1), 12) * 8
    params = SamplingParams(logprobs=TOP, prompt_logprobs=TOP, ignore_eos=True)
    with running(nano_f32, **EXACT, speculation="ngram", draft_always=True) as engine:
        generation = submit(engine, Question(prompt, 200, params=params))
        answer = await tokens_of(generation)
        assert generation.request.drafts.accepted > 0, "nothing was drafted: this proves nothing"
        assert generation.request.logprobs is not None
        check(reference, prompt, answer, generation.request.logprobs)


@pytest.mark.parametrize("asked", [{}, {"logprobs": 2}, {"prompt_logprobs": 2}], ids=str)
async def test_a_whole_answer_comes_early_with_them(nano_f32: Path, asked: dict[str, Any]) -> None:
    """Some tokens at a time, with their log-probabilities, so that these are written meanwhile."""
    prompt = random_prompt(random.Random(3), 20)
    request = Question(prompt, 60, params=SamplingParams(ignore_eos=True, **asked))
    with running(nano_f32, **EXACT) as engine:
        expected = [token async for tokens in submit(engine, request) for token in tokens]
        request.stream = False
        whole, arrived = submit(engine, request), []
        async for tokens in whole:
            arrived.append(tokens)
            scores = whole.request.logprobs
            assert scores is None or not scores.of_answer or len(scores.tokens) >= sum(map(len, arrived))
    assert list(itertools.chain(*arrived)) == expected
    assert (len(arrived) > 1) is ("logprobs" in asked), list(map(len, arrived))


async def test_the_tokens_are_those_without(nano_f32: Path) -> None:
    rng = random.Random(3)
    prompts = [random_prompt(rng, length) for length in (5, 80, 200)]
    plain = SamplingParams(ignore_eos=True)
    asked = SamplingParams(ignore_eos=True, logprobs=3, prompt_logprobs=0)
    with running(nano_f32, **EXACT) as engine:
        without = await ask_at_once(engine, [Question(prompt, 60, params=plain) for prompt in prompts])
        beside = await ask_at_once(engine, [Question(prompt, 60, params=asked) for prompt in prompts])
        await idle(engine)
    assert [answer.tokens for answer in beside] == [answer.tokens for answer in without]


@pytest.mark.parametrize("share", slow_but([0.01], [0.3, 0.01]))
async def test_of_constrained_answers(nano_f32: Path, reference: Reference, share: float) -> None:
    """Forced tokens are included; without log-probabilities no row is read for them."""
    prompt = random_prompt(random.Random(7), 30) * 3
    asked = SamplingParams(ignore_eos=True, logprobs=TOP, prompt_logprobs=TOP)
    with running(nano_f32, **EXACT, speculation="ngram", draft_always=True) as engine:
        constraint = Fickle(engine.vocab.size, share)
        plain = await tokens_of(
            engine.submit(
                GenerateRequest(
                    engine.prompt(prompt), SamplingParams(ignore_eos=True), 60, constraint=constraint.copy()
                )
            )
        )
        generation = engine.submit(GenerateRequest(engine.prompt(prompt), asked, 60, constraint=constraint))
        answer = await tokens_of(generation)
        assert answer == plain
        assert generation.request.logprobs is not None
        check(reference, prompt, answer, generation.request.logprobs)


async def test_no_token_is_generated_for_the_prompt_alone(nano_f32: Path, reference: Reference) -> None:
    prompt = random_prompt(random.Random(4), 100)
    params = SamplingParams(prompt_logprobs=TOP)
    with running(nano_f32, **EXACT) as engine:
        generation = submit(engine, Question(prompt, 0, params=params))
        assert await tokens_of(generation) == []
        assert generation.finish_reason == "length"
        assert generation.request.logprobs is not None
        assert generation.request.logprobs.tokens == []
        check(reference, prompt, [], generation.request.logprobs)


async def test_a_cached_prompt_is_read_again_and_leaves_its_state(nano_f32: Path) -> None:
    prompt = random_prompt(random.Random(5), 300)
    plain = SamplingParams(ignore_eos=True)

    async def cached(engine: Engine, params: SamplingParams) -> int:
        generation = submit(engine, Question(prompt, 2, params=params))
        await tokens_of(generation)
        await idle(engine)
        return generation.request.cached_tokens

    with running(nano_f32, **EXACT) as engine:
        assert await cached(engine, SamplingParams(ignore_eos=True, prompt_logprobs=0)) == 0
        assert await cached(engine, plain) > 250
        assert await cached(engine, SamplingParams(ignore_eos=True, prompt_logprobs=0)) == 0
        assert await cached(engine, SamplingParams(ignore_eos=True, logprobs=5)) > 250


async def test_preemption_loses_none(nano_f32: Path, reference: Reference) -> None:
    rng = random.Random(6)
    prompts = [random_prompt(rng, 180) for _ in range(4)]
    params = SamplingParams(logprobs=TOP, prompt_logprobs=TOP, ignore_eos=True)
    with running(nano_f32, **EXACT, ctx_size=768) as engine:
        generations = [submit(engine, Question(prompt, 200, params=params)) for prompt in prompts]
        for prompt, generation in zip(prompts, generations, strict=True):
            answer = await tokens_of(generation)
            assert generation.request.logprobs is not None
            check(reference, prompt, answer, generation.request.logprobs)
        assert engine.stats().preemptions > 0, "nobody was preempted: this proves nothing"


@pytest.mark.parametrize("value", [-1, 21])
@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_how_many_may_be_asked_for(field: str, value: int) -> None:
    fields: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=f"^{field} is {value}; it must be from 0 to 20"):
        SamplingParams(**fields)
