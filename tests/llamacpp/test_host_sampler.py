"""The sampler in numpy, for a llama.cpp without ours: the same tokens."""

from typing import Any

import numpy as np
import pytest

from qwen_serve.llamacpp import host_sampler
from qwen_serve.llamacpp.host_sampler import HostSampler, make_sampler, sample_on_host
from qwen_serve.llamacpp.row_results import RowResults
from qwen_serve.llamacpp.row_sampler import HAS_ROW_SAMPLER, Filters, Lowered, RowRequest
from tests.llamacpp.in_numpy import sampled
from tests.llamacpp.test_row_sampler import KINDS, Row, like_a_model

pytestmark = pytest.mark.skipif(not HAS_ROW_SAMPLER, reason="this llama.cpp has no row sampler")


def rows(trial: int) -> list[Row]:
    """A few of one size, as wide, as flat, and with as many ties as may be."""
    rng = np.random.default_rng(trial)
    n = int(rng.integers(8, 2000))
    if trial % 8 == 0:
        return [like_a_model(3000, trial + i) for i in range(4)]
    found = [rng.normal(0, rng.choice([0.01, 1.0, 4.0]), n).astype(np.float32) for _ in range(4)]
    return [np.round(row) for row in found] if trial % 4 == 1 else found


def told(trial: int, logits: list[Row], **filters: Any) -> RowResults:
    """The results of rows before and behind a draft, of a request with rules and penalties."""
    n = len(logits[0])
    rng, some = np.random.default_rng(trial), range(min(20, n))
    sampler = make_sampler(Filters(**filters, seed=trial), n - 3)  # the last ones are padding
    if trial % 3:
        sampler.penalise(1.3, 0.7, 0.2, (None, -1, 5)[trial % 3], [*some, -1, n])
        within = sampler.penalise(1.1, 0.0, 0.0, None, [])
        sampler.set_active(within, trial % 2 == 0)
    if trial % 5 == 0:
        sampler.bias([(1, 2.5), (2, -np.inf), (1, 0.5), (n, 9.0)])
        sampler.ban([3, 4], until=3)
        sampler.bad_word([1, 5, 6])
    if trial % 7 == 0:
        sampler.allow(range(0, n, 2))
    for token in (1, 2, 1):
        sampler.accept(token)
    draft = rng.integers(0, n, 3).tolist()
    mask = None if trial % 2 else np.packbits(rng.random(n) < 0.6, bitorder="little")
    words = None if mask is None else np.frombuffer(mask.tobytes() + bytes(-len(mask) % 4), np.uint32)
    lowered = Lowered(np.array([0, 5], np.int32), np.array([2.0, 1.0], np.float32), trial % 4 == 2)
    requests = [
        RowRequest(sampler, words, n_top, scored, token, lowered if trial % 6 else None)
        for token, n_top, scored in zip([*draft, -1], (5, -1, 20, 0), (-1, -1, 2, -1), strict=True)
    ]
    return sampled(requests, logits)


@pytest.mark.parametrize("name", [*KINDS, "best", "none"])
def test_the_same_tokens_as_ours(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the same noise. Ours rounds scores to 2^-24, which none of these draws is near to."""
    filters = KINDS.get(name, {"ops": ("best",) if name == "best" else ()})
    for trial in range(60):
        logits = rows(trial)
        ours = told(trial, logits, **filters)
        with monkeypatch.context() as stock:
            stock.setattr(host_sampler, "HAS_ROW_SAMPLER", False)
            theirs = told(trial, logits, **filters)
        assert theirs.tokens == ours.tokens, trial
        assert theirs.statuses == ours.statuses
        for i in range(len(logits)):
            ours_i, theirs_i = ours[i], theirs[i]
            assert theirs_i.rank == ours_i.rank
            assert theirs_i.best.tolist() == ours_i.best.tolist()
            assert theirs_i.logprob == pytest.approx(ours_i.logprob, abs=1e-5, nan_ok=True)
            np.testing.assert_allclose(theirs_i.best_logprobs, ours_i.best_logprobs, atol=1e-5)
            assert theirs_i.surprise == pytest.approx(ours_i.surprise, abs=2**10)


def test_the_sampler_is_as_before_behind_a_draft() -> None:
    sampler, logits = HostSampler(Filters(("temperature",), seed=3), 500), like_a_model(500)
    requests = [RowRequest(sampler, draft=token) for token in (1, 2, -1)]
    first = sample_on_host(requests, [logits] * 3).tokens
    assert sample_on_host(requests, [logits] * 3).tokens == first
