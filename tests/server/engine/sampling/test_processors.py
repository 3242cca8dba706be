"""A request's rules about single tokens, on rows and in the engine."""

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from qwen_serve.server.engine import NoTokenLeft, SamplingParams, Vocab
from qwen_serve.server.engine.sampling import Sampler
from tests.server.engine.helpers import EXACT, Question, ask, random_prompt, running
from tests.server.engine.sampling.fake_rows import choose

N = 8
ENDS = frozenset({6})
VOCAB = cast("Vocab", SimpleNamespace(n_real=N, eog_ids=ENDS, size=N + 2))


def choices(
    params: SamplingParams, rows: Sequence[Sequence[float]], prompt: Sequence[int] = (1,)
) -> list[int]:
    sampler = Sampler(params, VOCAB, prompt)
    return [choose(sampler, np.array([*row, 9.0, 9.0], np.float32)) for row in rows]  # with padding


RISING = [float(token) for token in range(N)]


def test_bias_moves_the_choice() -> None:
    assert choices(SamplingParams(logit_bias=((2, 5.5), (N, 100.0))), [RISING]) == [2]
    assert choices(SamplingParams(logit_bias=((7, -100.0),)), [RISING]) == [6]


def test_bias_comes_before_penalties() -> None:
    params = SamplingParams(logit_bias=((3, 10.0),), repetition_penalty=2.0)
    assert choices(params, [RISING], prompt=[3]) == [7]  # 13 / 2 < 7, but 3 / 2 + 10 is not
    assert choices(params, [RISING], prompt=[1]) == [3]


def test_allowed_tokens() -> None:
    params = SamplingParams(allowed_token_ids=(1, 4, 5, N + 1), logit_bias=((4, 3.0),))
    assert choices(params, [RISING]) == [4]
    drawn = SamplingParams(allowed_token_ids=(1, 2), temperature=50.0, seed=1)
    assert set(choices(drawn, [RISING] * 40)) == {1, 2}


def test_bad_words() -> None:
    params = SamplingParams(bad_words=((7,), (6, 5), (5, 5, 4)))
    assert choices(params, [RISING] * 3) == [6, 6, 6]
    assert choices(params, [RISING, [0, 0, 1, 0, 0, 9, 0, 0]]) == [6, 2]
    assert choices(params, [[0, 0, 0, 0, 1, 9, 0, 0]] * 4) == [5, 5, 5, 5]
    four = [0, 0, 0, 2, 9, 0, 0, 0]
    five = [0, 0, 0, 0, 0, 9, 0, 0]
    assert choices(params, [four, five, four, five, five, four]) == [4, 5, 4, 5, 5, 3]


def test_no_end_before_there_are_enough() -> None:
    end_first = [0, 0, 0, 1, 0, 0, 9, 0]
    assert choices(SamplingParams(min_tokens=2), [end_first] * 3) == [3, 3, 6]
    stops = SamplingParams(min_tokens=1, stop_token_ids=frozenset({3}))
    assert choices(stops, [end_first] * 2) == [0, 6]


def test_an_end_that_is_asked_for_is_not_ignored() -> None:
    params = SamplingParams(ignore_eos=True, stop_token_ids=ENDS)
    assert choices(params, [[0, 0, 0, 1, 0, 0, 9, 0]]) == [6]


def test_nothing_is_left() -> None:
    with pytest.raises(NoTokenLeft, match="leave no token to choose"):
        choices(SamplingParams(allowed_token_ids=(6,), min_tokens=1), [RISING])


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": -1},
        {"allowed_token_ids": ()},
        {"bad_words": ((),)},
        {"logit_bias": ((1, float("nan")),)},
        {"logit_bias": ((1, 1e39),)},  # infinity in a float32, as is the next
        {"presence_penalty": -1e39},
        {"frequency_penalty": -1e38},  # some tokens make it infinity
    ],
)
def test_what_is_no_rule(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        SamplingParams(**fields)


SHAPES: dict[str, dict[str, Any]] = {
    "alone": {"speculation": "off"},
    "with drafts": {"speculation": "ngram", "draft_always": True},
    "in the graph": {"speculation": "ngram", "draft_always": True, "sampling": "device"},
}


@pytest.mark.parametrize("shape", SHAPES)
async def test_in_the_engine(shape: str, nano_f32: Path) -> None:
    prompt = random_prompt(random.Random(2), 9) * 6
    with running(nano_f32, **EXACT, **SHAPES[shape]) as engine:

        async def answer(max_tokens: int = 40, **fields: Any) -> tuple[list[int], Any]:
            params = SamplingParams(**{"ignore_eos": True, **fields})
            found = await ask(engine, Question(prompt, max_tokens, params=params))
            return found.tokens, found.finish_reason

        plain, _ = await answer()
        stop = plain[len(plain) // 2]
        cut = plain[: plain.index(stop)]
        assert await answer(stop_token_ids=frozenset({stop})) == (cut, "stop")
        assert await answer(stop_token_ids=frozenset({stop}), include_stop=True) == ([*cut, stop], "stop")
        assert await answer(len(cut), stop_token_ids=frozenset({stop})) == (cut, "length")
        later, _ = await answer(stop_token_ids=frozenset({stop}), min_tokens=30, max_tokens=64)
        assert len(later) >= 30
        assert stop not in later
        biased, _ = await answer(logit_bias=((300, 100.0),))
        assert biased == [300] * 40
        allowed, _ = await answer(allowed_token_ids=tuple(range(400, 420)))
        assert set(allowed) <= set(range(400, 420))
        word = tuple(plain[3:5])
        clean, _ = await answer(bad_words=(word, (plain[0],)))
        assert plain[0] not in clean
        assert word not in set(pairwise(clean))
        # its state was kept for what it holds, and no more
        assert (await answer())[0] == plain
        goes_on = await ask(engine, Question([*prompt, *cut], 40 - len(cut)))
        assert goes_on.tokens == plain[len(cut) :]
