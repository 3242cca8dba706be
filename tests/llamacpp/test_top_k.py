"""Which of equal logits is chosen."""

from __future__ import annotations

import numpy as np
import pytest

from qwen_serve.llamacpp import DeviceSampler
from qwen_serve.llamacpp.ahead import HAS_NEXT_TOKENS
from qwen_serve.llamacpp.device_sampler import n_blocks
from qwen_serve.llamacpp.rows import best_tokens
from tests.llamacpp.test_device_sampler import computed


@pytest.mark.skipif(not HAS_NEXT_TOKENS, reason="this llama.cpp has no patch next-tokens")
@pytest.mark.parametrize("n_ends", [0, 5])
def test_of_equal_logits_the_next_step_reads_the_lowest_token(n_ends: int) -> None:
    """As the host chooses it. An end of the answer may be among them, and some are banned."""
    rng, n_vocab = np.random.default_rng(n_ends), 31 * 32
    logits = np.zeros((40, n_vocab), np.float32)
    for row, at in enumerate(rng.random((40, n_vocab)).argsort(axis=1)[:, :12]):
        logits[row, at] = rng.choice([3e-5, 7.25, 11.5])
    logits[:, 900:] = 50
    ends = sorted(rng.permutation(900)[:n_ends].tolist())
    logits[::3, ends] = logits[::3, :900].max(axis=1, keepdims=True)
    figures = computed(DeviceSampler.BEST, logits, ends, 900, exact=True)
    blocks = n_blocks(n_vocab)
    assert figures[:, 0].tolist() == best_tokens(figures[:, 1:], blocks).tolist()
