"""A decode reads tokens that the device chose in the decode before."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from qwen_serve.llamacpp import Context, DeviceSampler
from qwen_serve.llamacpp.ahead import HAS_NEXT_TOKENS
from qwen_serve.llamacpp.errors import LlamaError, NoMemorySlot
from tests.contexts import exact_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qwen_serve.llamacpp import Model

pytestmark = pytest.mark.skipif(not HAS_NEXT_TOKENS, reason="this llama.cpp has no patch next-tokens")


def decode(context: Context, tokens: dict[int, int], position: int, rows: Sequence[int] = ()) -> list[int]:
    """Decode a token of each sequence; return their best tokens."""
    n = len(tokens)
    context.tokens[:n], context.sequences[:n] = list(tokens.values()), list(tokens)
    context.positions[:n], context.outputs[:n] = position, 1
    context.decode(n, next_rows=np.array(rows, np.int32) if rows else None)
    found = context.rows(list(tokens), range(n)).all_best()
    assert found is not None
    return [*found]


@pytest.mark.parametrize(
    ("sequences", "rows"),
    [
        ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
        ([0, 1, 4], [0, 1, 4]),
        ([3, 1, 2, 0], [3, 1, 2, 0]),
        ([0, 1, 2, 3, 4], [-1, 1, 2, -1, 4]),
    ],
    ids=["all", "fewer", "another order", "some from the host"],
)
def test_each_token_comes_from_its_row_or_from_the_host(
    model: Model, sequences: list[int], rows: list[int]
) -> None:
    options = exact_options(n_ctx=64, n_batch=16, n_outputs=8, n_seq=6)
    context = Context(model, replace(options, n_samplers=6, sampler=DeviceSampler.BEST, ahead=True))
    assert context.runs_ahead
    first = {sequence: 300 + 17 * sequence for sequence in range(5)}
    chosen = decode(context, first, 0)
    assert len(set(chosen)) > 3
    known = [999 if row < 0 else chosen[row] for row in rows]
    expected = decode(context, dict(zip(sequences, known, strict=True)), 1)
    context.clear()
    decode(context, first, 0)
    given = [999 if row < 0 else 7 for row in rows]
    assert decode(context, dict(zip(sequences, given, strict=True)), 1, rows) == expected
    context.close()


def test_a_batch_that_is_refused_leaves_nothing_behind(model: Model) -> None:
    """The next decode reads its own tokens."""
    options = exact_options(n_ctx=64, n_batch=16, n_outputs=8, n_seq=6)
    context = Context(model, replace(options, n_samplers=6, sampler=DeviceSampler.BEST, ahead=True))
    expected = decode(context, {0: 300, 1: 400}, 0)
    n = context.n_batch
    context.tokens[:n], context.sequences[:n], context.outputs[:n] = 7, 2, 0
    for start in range(0, context.n_ctx - n, n):
        context.positions[:n] = range(start, start + n)
        context.decode(n)
    with pytest.raises(NoMemorySlot):
        for position in range(1, n):
            decode(context, {0: 7, 1: 7}, position, [0, 1])
    context.clear()
    assert decode(context, {0: 300, 1: 400}, 0) == expected
    context.close()


def test_tokens_on_the_device_are_those_of_one_pass(model: Model) -> None:
    """A batch in several passes is refused before anything is computed, and says how many rows are the
    last's."""
    options = exact_options(n_ctx=64 * 6, n_batch=16, n_outputs=8, n_seq=6)
    how = replace(options, n_samplers=6, sampler=DeviceSampler.BEST, ahead=True, unified=False)
    context = Context(model, how)
    first = {0: 300, 1: 400, 3: 500}
    expected = decode(context, first, 0)
    outputs = context.outputs_ahead()
    assert outputs is not None
    assert outputs.n_last == 1
    with pytest.raises(LlamaError, match="llama_decode returned -1"):
        decode(context, first, 1, [0, 1, 2])
    again = decode(context, dict(zip(first, expected, strict=True)), 1)
    context.clear()
    assert decode(context, first, 0) == expected
    assert decode(context, dict(zip(first, expected, strict=True)), 1) == again
    context.close()
