"""Mirostat in our sampler: its bound follows the surprises of the tokens drawn."""

import math

import numpy as np
import pytest

from qwen_serve.llamacpp.host_sampler import make_sampler
from qwen_serve.llamacpp.row_sampler import Filters
from tests.llamacpp.in_numpy import IN_NUMPY, builds
from tests.llamacpp.test_row_sampler import Q, choose, kept, like_a_model

__all__ = ["builds"]  # a fixture

pytestmark = IN_NUMPY


@pytest.mark.parametrize("op", ["mirostat", "mirostat_v2"])
def test_mirostat_follows_the_surprises(op: str) -> None:
    """They come near tau, of a token that they leave; a row of a sampler that did not follow them is not."""
    logits, tau = like_a_model(5000), 3.0
    sampler = make_sampler(Filters((op,), seed=3, mirostat_tau=tau, mirostat_eta=0.1), 5000)
    surprises = []
    for _ in range(400):
        found = choose(sampler, logits)
        assert found.token in kept(logits, False, ops=(), mirostat_tau=tau)
        sampler.observe(found.surprise)
        sampler.accept(found.token)
        surprises.append(found.surprise / 2**Q)
    assert min(surprises) >= 0
    assert np.mean(surprises[100:]) == pytest.approx(tau, abs=0.3)
    idle = make_sampler(Filters((op,), seed=3, mirostat_tau=0.01, mirostat_eta=0.1), 5000)
    assert {choose(idle, logits).token for _ in range(3)} == {int(logits.argmax())}


@pytest.mark.parametrize("tau", [0.5, 2.0, 4.0])
def test_mirostat_leaves_what_it_says(tau: int) -> None:
    logits, p = like_a_model(5000), kept(like_a_model(5000), False, ops=())
    wanted = kept(logits, False, ops=("mirostat_v2",), mirostat_tau=tau)
    for seed in range(50):
        found = choose(make_sampler(Filters(("mirostat_v2",), seed=seed, mirostat_tau=tau), 5000), logits)
        assert -math.log2(p[found.token]) <= 2 * tau + 1e-4 or found.token == int(logits.argmax())
        assert found.surprise / 2**Q == pytest.approx(-math.log2(wanted[found.token]), abs=1e-4)
