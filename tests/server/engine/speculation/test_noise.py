"""Quantized, too, drafts change no answer by more than the noise that the shape of a batch makes anyway."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.marks import slow_but
from tests.server.engine.helpers import Alone, Question, ask, ask_all, random_prompt, running

N = 96
TYPES: dict[str, Any] = {"flash_attn": "auto", "cache_type_k": "f16", "cache_type_v": "f16"}
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"speculation": "ngram"},
    "mtp": {"speculation": "mtp", "mtp_depth": 4},
    "auto": {"speculation": "both", "mtp_depth": 4},
    "mtp, no snapshots": {"speculation": "mtp", "mtp_depth": 4, "snapshots": 0},
}


def lead(rows: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """How far the second of each row's pair of tokens lies above the first: shape [n]."""
    return np.diff(np.take_along_axis(rows, pairs, axis=1), axis=1)[:, 0]


def noise_of_shapes(reference: Alone, texts: Sequence[list[int]], rows: Sequence[np.ndarray]) -> float:
    """How far the gap between a row's two best logits moves when it is computed among other rows."""
    pairs = [np.argpartition(row, -2, axis=1)[:, -2:] for row in rows]
    others = [[reference.logits(text, chunk) for text in texts] for chunk in (1, 3, 5)]
    others.append(reference.logits_together(texts))
    return max(
        float(np.abs(lead(shape, pair) - lead(row, pair)).max())
        for other in others
        for row, shape, pair in zip(rows, other, pairs, strict=True)
    )


@pytest.mark.parametrize("drafter", slow_but(["auto"], DRAFTERS))
async def test_every_token_is_the_best_but_for_noise(drafter: str, nano_q4_k_m: Path) -> None:
    rng = random.Random(11)
    requests = [Question(random_prompt(rng, length), N) for length in (40, 120)]
    settings = {**TYPES, **DRAFTERS[drafter], "draft_always": True, "parallel": 4, "ctx_size": 4096}
    with running(nano_q4_k_m, **settings) as engine:
        answers = [await ask(engine, request) for request in requests]
        answers += await ask_all(engine, requests)
        counts = engine.stats().drafts
    assert all(count.accepted for count in counts.values())

    texts = [request.prompt + answer.tokens for request, answer in zip(requests * 2, answers, strict=True)]
    reference = Alone(nano_q4_k_m, **TYPES)
    rows = [reference.logits(text, 512) for text in texts]
    noise = noise_of_shapes(reference, texts, rows)
    reference.close()
    deviation = np.mean([row[np.isfinite(row)].std() for row in rows])
    assert noise < 0.3 * deviation, "so much noise would excuse any answer"

    for request, answer, row in zip(requests * 2, answers, rows, strict=True):
        assert len(answer.tokens) == N
        for token, logits in zip(answer.tokens, row[len(request.prompt) - 1 : -1], strict=True):
            below = float(logits.max() - logits[token])
            assert below <= noise, f"{below:.4f} below the best; shapes move the gap by {noise:.4f}"
