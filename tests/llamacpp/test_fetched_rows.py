"""A whole row is found by its token, in whatever pass and order llama.cpp computed it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from qwen_serve.llamacpp import Context, DeviceSampler, rows
from qwen_serve.llamacpp.errors import LlamaError
from qwen_serve.llamacpp.rows import READS_LOGITS
from tests.contexts import exact_options

if TYPE_CHECKING:
    import numpy.typing as npt

    from qwen_serve.llamacpp import Model

pytestmark = pytest.mark.skipif(not READS_LOGITS, reason="this llama.cpp has no patch steps-apart")

N_SEQ = 8

Batch = dict[int, tuple[int, int]]
"""Tokens of each sequence id, and how many of the last ones have rows."""

BATCHES: dict[str, Batch] = {
    "a step": {0: (1, 1), 1: (1, 1), 2: (1, 1)},
    "a step with free ids between": {0: (1, 1), 2: (1, 1), 3: (1, 1), 6: (1, 1)},
    "ids in descending order": {5: (1, 1), 4: (1, 1), 1: (1, 1)},
    "ends of prompts": {0: (3, 1), 1: (9, 1), 2: (4, 1), 3: (9, 1)},
    "the last pass has no row": {0: (3, 1), 1: (9, 0), 2: (4, 1)},
    "drafts": {4: (5, 5), 1: (2, 2), 2: (5, 5), 3: (1, 1)},
    "several passes of one sequence": {0: (70, 40), 3: (2, 1)},
}


def make(model: Model, *, unified: bool, kind: DeviceSampler | None) -> Context:
    options = exact_options(
        n_ctx=128 * N_SEQ,
        n_batch=256,
        n_outputs=128,
        n_seq=N_SEQ,
        n_outputs_per_seq=64,
        n_samplers=0 if kind is None else N_SEQ,
        sampler=kind or DeviceSampler.BEST,
    )
    return Context(model, replace(options, unified=unified, n_ubatch=32))


def write(context: Context, batch: Batch) -> tuple[list[int], list[int]]:
    """The sequence and the index in the batch of each row."""
    start = 0
    sequences: list[int] = []
    indices: list[int] = []
    for sequence, (length, n_rows) in batch.items():
        end = start + length
        context.tokens[start:end] = np.random.default_rng(sequence).integers(256, 2000, length)
        context.positions[start:end], context.sequences[start:end] = np.arange(length), sequence
        context.outputs[start:end] = np.arange(length) >= length - n_rows
        sequences += [sequence] * n_rows
        indices += range(end - n_rows, end)
        start = end
    return sequences, indices


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("unified", [True, False], ids=["one pool", "own cells"])
@pytest.mark.parametrize("kind", [DeviceSampler.TOP_K, DeviceSampler.LOGPROBS, DeviceSampler.BEST])
def test_each_row_is_that_of_its_token(
    model: Model, batch: Batch, unified: bool, kind: DeviceSampler
) -> None:
    whole, sampled = make(model, unified=unified, kind=None), make(model, unified=unified, kind=kind)
    for context in (whole, sampled):
        sequences, indices = write(context, batch)
        context.decode(sum(length for length, _ in batch.values()), keep=True)
    right, found = whole.rows(sequences, indices), sampled.rows(sequences, indices)
    order = random.Random(0).sample(range(len(indices)), len(indices))
    for row in order:
        np.testing.assert_allclose(found.fetch(row), right.logits(row), atol=1e-4)
    assert len({right.logits(row).tobytes() for row in order}) == len(order)
    whole.close()
    sampled.close()


def test_only_the_last_pass_is_kept_unless_wanted(model: Model) -> None:
    context = make(model, unified=False, kind=DeviceSampler.TOP_K)
    sequences, indices = write(context, BATCHES["a step with free ids between"])
    context.decode(4)
    found = context.rows(sequences, indices)
    assert found.fetch(3).size == context._n_vocab  # noqa: SLF001 - no other way to know it
    with pytest.raises(LlamaError, match="token 0 of the batch were not kept"):
        found.fetch(0)
    context.close()


def test_a_row_of_another_token_is_refused(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    context = make(model, unified=False, kind=DeviceSampler.TOP_K)
    sequences, indices = write(context, BATCHES["a step"])
    context.decode(3, keep=True)
    found, read = context.rows(sequences, indices), rows._read_logits  # noqa: SLF001 - a build with a bug
    monkeypatch.setattr(rows, "_read_logits", lambda handle, index, to: read(handle, (index + 1) % 3, to))
    for row in range(3):
        with pytest.raises(LlamaError, match=f"token {row} of the batch are those of another token"):
            found.fetch(row)
    context.close()


@pytest.mark.parametrize("unified", [True, False], ids=["one pool", "own cells"])
def test_hidden_rows_that_are_read_late_are_in_the_order_of_the_batch(model: Model, unified: bool) -> None:
    context = make(model, unified=unified, kind=DeviceSampler.BEST)
    context.keep_hidden()
    batch = {5: (9, 1), 2: (3, 1), 3: (9, 1)}
    n = sum(length for length, _ in batch.values())

    def hidden(late: bool) -> npt.NDArray[np.float32]:
        context.clear()
        write(context, batch)
        context.decode(n)
        if not late:
            return context.hidden(n).copy()
        write(context, {0: (1, 1)})
        assert context.keeps_rows(1, 1, 1)
        context.decode(1)
        return context.hidden(n).copy()

    right = hidden(late=False)
    np.testing.assert_allclose(hidden(late=True)[1:], right[1:], atol=1e-4)
    context.close()
