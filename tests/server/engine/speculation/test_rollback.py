"""The bare context, fuzzed: append, verify, roll back, copy, and batch mates, against fresh prefills."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from server.engine.llama import Context, ContextOptions, Model
from server.engine.speculation.rollback import Rollback
from tests.server.engine.helpers import EXACT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy.typing as npt

SLOTS, SPARE = 3, 2
FIRST_HOLDER, FIRST_SPARE = SLOTS, 2 * SLOTS


@pytest.fixture(scope="module")
def context(nano_f32: Path) -> Iterator[Context]:
    model = Model(nano_f32, n_gpu_layers=0)
    n_seq = 2 * SLOTS + SPARE + 1
    options = ContextOptions(
        n_ctx=4096,
        n_seq=n_seq,
        n_batch=256,
        n_ubatch=64,
        n_outputs=256,
        threads=1,
        threads_batch=1,
        flash_attn=EXACT["flash_attn"],
        type_k=EXACT["cache_type_k"],
        type_v=EXACT["cache_type_v"],
    )
    context = Context(model, options)
    yield context
    context.close()
    model.close()


def decode(context: Context, parts: dict[int, tuple[int, list[int]]]) -> dict[int, npt.NDArray[np.float32]]:
    """Tokens of several sequence ids, each from a position on, in one call: the last logits of each."""
    n, last = 0, {}
    for sequence, (start, tokens) in parts.items():
        end = n + len(tokens)
        context.tokens[n:end] = tokens
        context.positions[n:end] = range(start, start + len(tokens))
        context.sequences[n:end] = sequence
        context.outputs[n:end] = 0
        context.outputs[end - 1] = 1
        last[sequence] = len(last)
        n = end
    context.decode(n)
    rows = context.logits(len(last)).copy()
    return {sequence: rows[row] for sequence, row in last.items()}


def fresh(context: Context, text: list[int]) -> npt.NDArray[np.float32]:
    """Logits after a text that is read on its own."""
    last = 2 * SLOTS + SPARE
    for start in range(0, len(text), 64):
        rows = decode(context, {last: (start, text[start : start + 64])})
    context.remove(last)
    return rows[last]


@pytest.mark.parametrize("seed", range(3))
def test_every_state_is_that_of_its_text(context: Context, seed: int) -> None:
    rng = random.Random(seed)
    context.clear()
    rollback = Rollback(context, FIRST_HOLDER)
    texts: dict[int, list[int]] = {}
    spares: dict[int, list[int]] = {}

    def some(n: int) -> list[int]:
        return [rng.randrange(300, 2000) for _ in range(n)]

    compared = 0
    for _ in range(30):
        parts: dict[int, tuple[int, list[int]]] = {}
        rejected: dict[int, int] = {}
        for slot in range(SLOTS):
            do = rng.random()
            if slot in texts and do < 0.1:
                context.remove(slot)
                rollback.forget(slot)
                del texts[slot]
            if slot not in texts and spares and do < 0.5:
                spare = rng.choice(list(spares))
                context.copy(spare, slot)
                texts[slot] = list(spares[spare])
            if do > 0.8:
                continue
            text = texts.setdefault(slot, [])
            new = some(rng.choice([1, 1, 2, 5, 9, 40]))
            if do > 0.3:  # verified as a draft, of which a part may be wrong
                rollback.save(slot, len(text))
                right = rng.choice([len(new), rng.randint(0, len(new) - 1)])
                if right < len(new):
                    rejected[slot] = right
            parts[slot] = len(text), new
        if not parts:
            continue
        rows = decode(context, parts)
        for slot, (_, new) in parts.items():
            if slot in rejected:
                rollback.restore(slot)
            else:
                texts[slot] += new
                assert np.abs(rows[slot] - fresh(context, texts[slot])).max() < 2e-4
                compared += 1
        if texts and rng.random() < 0.3:
            slot, spare = rng.choice(list(texts)), rng.randrange(FIRST_SPARE, FIRST_SPARE + SPARE)
            if texts[slot]:
                context.remove(spare)
                context.copy(slot, spare)
                spares[spare] = list(texts[slot])
    assert compared > 10
