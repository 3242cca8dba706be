"""What the device guesses is what the host draws."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from qwen_serve.llamacpp import Context, DeviceSampler, SamplerChain
from qwen_serve.llamacpp.ahead import HAS_NEXT_TOKENS
from qwen_serve.llamacpp.guessed_draws import STEPS
from qwen_serve.llamacpp.samplers import RandomNumbers
from qwen_serve.server.engine.sampling import Sampler, SamplingParams
from qwen_serve.server.engine.vocab import Vocab
from tests.contexts import exact_options

if TYPE_CHECKING:
    from qwen_serve.llamacpp import Model

ROWS = 48


def test_numbers_are_those_of_the_draws() -> None:
    """Of 2^20 equal tokens the number tells which is drawn, also after draws that nobody looked ahead of."""
    chain, numbers, n = SamplerChain([("dist", 12345)]), RandomNumbers(12345), 2**20
    ids, logits = np.arange(n, dtype=np.int32), np.zeros(n, np.float32)
    for ahead in (1, 3, 200, 2):
        expected = [numbers.next(i + 1)[i] for i in range(ahead)]
        assert [chain.draw(ids, logits) / n for _ in range(ahead)] == pytest.approx(expected, abs=2 / n)
        chain.draw(ids, logits)
        numbers.drawn += ahead + 1
    chain.close()


@pytest.mark.skipif(not HAS_NEXT_TOKENS, reason="this llama.cpp has no patch next-tokens")
def test_guesses_are_the_draws(model: Model) -> None:
    """For STEPS steps of one decode; a few rows are greedy, some exclude the ends of generation."""
    vocab, rng = Vocab(model), np.random.default_rng(1)
    options = exact_options(n_ctx=64, n_batch=64, n_outputs=64, n_seq=1, n_outputs_per_seq=64)
    options = replace(options, n_samplers=1, sampler=DeviceSampler.TOP_K, ahead=True)
    context = Context(model, options)
    samplers = [
        Sampler(
            SamplingParams(
                temperature=rng.choice([0.0, 0.3, 1.0, 2.0, 5.0]),
                top_k=int(rng.choice([1, 2, 20, 50])),
                top_p=rng.choice([0.5, 0.9, 1.0]),
                min_p=rng.choice([0.0, 0.05, 1.0]),
                ignore_eos=bool(row % 2),
                seed=row,
            ),
            vocab,
            [],
        )
        for row in range(ROWS)
    ]
    assert context.runs_ahead
    assert context.samplers.next_tokens is not None
    guessed = {}
    for row, sampler in enumerate(samplers):
        assert sampler.draw is not None
        guessed[row] = sampler.draw, sampler.numbers(STEPS).copy()
    context.samplers.next_tokens.write([False] * ROWS, guessed)
    context.tokens[:ROWS] = rng.integers(256, 2000, ROWS)
    context.positions[:ROWS] = np.arange(ROWS)
    context.sequences[:ROWS] = 0
    context.outputs[:ROWS] = 1
    drawn = []
    for _ in range(STEPS):
        context.clear()
        context.decode(ROWS)
        rows = context.rows([0] * ROWS, range(ROWS))
        drawn.append([sampler.sample(rows, row) for row, sampler in enumerate(samplers)])
        assert rows.next_tokens() == drawn[-1]
    assert np.mean([one != drawn[0] for one in drawn]) > 0.9
    for sampler in samplers:
        sampler.close()
    context.close()
