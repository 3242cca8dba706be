"""Scales and minima are never much worse than llama.cpp's and mostly better, for any input."""

import pytest
from gguf import GGMLQuantizationType as Type

from qwen_serve.convert.compensation.grids import GRIDS
from qwen_serve.convert.compensation.packing import pack
from qwen_serve.convert.compensation.scales import search_blocks
from qwen_serve.llamacpp.weights import dequantize_rows, quantize_rows

import numpy as np  # isort: skip


@pytest.mark.parametrize("kind", GRIDS, ids=lambda kind: kind.name)
def test_the_error_is_below_llama_cpps(kind: Type) -> None:
    rng = np.random.default_rng(1)
    values = (rng.standard_normal((64, 512)) * np.exp(rng.standard_normal((64, 1)))).astype(np.float32)
    importance = np.exp(rng.standard_normal(512)).astype(np.float32)
    ours = search_blocks(np.ascontiguousarray(values.T), importance, GRIDS[kind]).values().T
    theirs = dequantize_rows(quantize_rows(values[None], kind, importance[None]), kind)[0]

    squares = np.square(values).reshape(64, -1, GRIDS[kind].block)
    size = np.sqrt(squares.mean(-1, keepdims=True) + squares).reshape(values.shape)

    def error(found: np.ndarray) -> float:
        return float((np.square(found - values) * importance * size).sum())

    assert error(ours) < error(theirs)


@pytest.mark.parametrize("kind", GRIDS, ids=lambda kind: kind.name)
def test_odd_weights_are_no_trouble(kind: Type) -> None:
    rng = np.random.default_rng(2)
    rows = rng.standard_normal((8, 256)).astype(np.float32)
    rows[0] = 0
    rows[1] = 0.25
    rows[2] = -0.25
    rows[3, :200] = 0
    rows[4] *= 1e-7
    rows[5] *= 1e4
    rows[6] = np.abs(rows[6])
    rows[7] = -np.abs(rows[7])
    blocks = search_blocks(np.ascontiguousarray(rows.T), np.ones(256, np.float32), GRIDS[kind])
    values = blocks.values().T
    assert np.isfinite(values).all()
    np.testing.assert_array_equal(values[0], 0)
    np.testing.assert_array_equal(dequantize_rows(pack(kind, blocks), kind), values)
    off = np.square(values - rows).sum(axis=1) / np.maximum(np.square(rows).sum(axis=1), 1e-30)
    assert (off[[1, 2, 3, 5, 6, 7]] < 0.2).all()
