"""The part of a row that requests need, and choices among a device's candidates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from qwen_serve.llamacpp import N_CANDIDATES, DeviceSampler, Model
from qwen_serve.server.engine.sampling import Sampler, SamplingParams, candidates
from qwen_serve.server.engine.sampling.candidates import best_of
from qwen_serve.server.engine.vocab import Vocab

if TYPE_CHECKING:
    from qwen_serve.llamacpp import Rows


@pytest.mark.parametrize(
    ("params", "need"),
    [
        (SamplingParams(), DeviceSampler.BEST),
        (SamplingParams(ignore_eos=True), DeviceSampler.BEST),
        (SamplingParams(temperature=1.0, top_k=1), DeviceSampler.BEST),
        (SamplingParams(temperature=1.0, top_k=N_CANDIDATES), DeviceSampler.TOP_K),
        (SamplingParams(temperature=1.0, top_k=N_CANDIDATES, ignore_eos=True), DeviceSampler.ROW),
        (SamplingParams(temperature=1.0, top_p=0.9), DeviceSampler.ROW),
        (SamplingParams(presence_penalty=1.0), DeviceSampler.TOP_K),
        (SamplingParams(presence_penalty=-1.0), DeviceSampler.ROW),
        (SamplingParams(frequency_penalty=-0.1), DeviceSampler.ROW),
        (SamplingParams(repetition_penalty=0.9), DeviceSampler.ROW),
        (SamplingParams(presence_penalty=1.5, temperature=1.0, top_p=0.95, top_k=20), DeviceSampler.TOP_K),
        (SamplingParams(presence_penalty=1.5, temperature=1.0, top_k=N_CANDIDATES), DeviceSampler.ROW),
        (SamplingParams(presence_penalty=1.5, temperature=1.0), DeviceSampler.ROW),
        (SamplingParams(presence_penalty=1.5, logit_bias=((5, -1.0),)), DeviceSampler.ROW),
        (SamplingParams(logprobs=20), DeviceSampler.LOGPROBS),
        (SamplingParams(logprobs=0, temperature=1.0, top_k=20), DeviceSampler.LOGPROBS),
        (SamplingParams(logprobs=0, ignore_eos=True), DeviceSampler.LOGPROBS),
        (SamplingParams(logprobs=1, temperature=1.0, top_k=N_CANDIDATES, ignore_eos=True), DeviceSampler.ROW),
        (SamplingParams(logprobs=1, temperature=1.0), DeviceSampler.ROW),
        (SamplingParams(logprobs=1, repetition_penalty=1.1), DeviceSampler.ROW),
        (SamplingParams(prompt_logprobs=0), DeviceSampler.ROW),
    ],
)
def test_what_a_request_needs(
    model: Model, params: SamplingParams, need: DeviceSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where whole rows cannot be fetched, penalties need them from the start."""
    for reads in (True, False):
        monkeypatch.setattr(candidates, "READS_LOGITS", reads)
        sampler = Sampler(params, Vocab(model), [1])
        penalised = need is DeviceSampler.TOP_K and params.presence_penalty
        assert sampler.need is (DeviceSampler.ROW if penalised and not reads else need)
        sampler.close()


def test_of_equal_candidates_the_lowest_is_the_best(model: Model) -> None:
    """It is, in any order of the device's candidates, as with a whole row."""
    sampler = Sampler(SamplingParams(), Vocab(model), [1])
    rows = SimpleNamespace(
        kinds=(DeviceSampler.TOP_K,),
        candidates=lambda _: (np.array([900, 300, 500, 400], np.int32), np.array([2, 2, 1, 2], np.float32)),
    )
    assert sampler.sample(cast("Rows", rows), 0) == 300
    sampler.close()


@pytest.mark.parametrize("n", [5, 300, 40_000])
@pytest.mark.parametrize("k", [1, 20, 64])
def test_the_best_of_many(n: int, k: int) -> None:
    rng = np.random.default_rng(n + k)
    values = rng.normal(size=n).astype(np.float32)
    values[rng.integers(0, n, n // 3)] = -np.inf
    found = best_of(values, k)
    best = -np.sort(-values)[: min(k, n)]
    np.testing.assert_array_equal(-np.sort(-values[found]), best)


@pytest.mark.parametrize("n", [300, 40_000])
def test_of_equal_ones_the_lowest_ids(n: int) -> None:
    values = np.zeros(n, np.float32)
    values[200:203] = 1
    assert sorted(best_of(values, 5).tolist()) == [0, 1, 200, 201, 202]
