"""Packed blocks: gguf and llama.cpp decode every value of a grid exactly."""

import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

from qwen_serve.convert.compensation.grids import GRIDS, Blocks
from qwen_serve.convert.compensation.packing import pack, unpack
from qwen_serve.llamacpp.weights import dequantize_rows

import numpy as np  # isort: skip

WIDTH, ROWS = 1024, 24


@pytest.mark.parametrize("kind", GRIDS, ids=lambda kind: kind.name)
def test_whatever_blocks_hold_is_read_back_exactly(kind: Type) -> None:
    blocks = made_up(kind)
    data = pack(kind, blocks)
    block, n_bytes = GGML_QUANT_SIZES[kind]
    assert data.shape == (ROWS, WIDTH // block * n_bytes)
    values = blocks.values().T
    assert len(np.unique(blocks.levels)) == len(blocks.grid.levels)
    np.testing.assert_array_equal(dequantize(data, kind), values)
    np.testing.assert_array_equal(dequantize_rows(data, kind), values)
    for name, found in vars(unpack(kind, data)).items():
        if name != "grid" and (name != "dmin" or blocks.grid.minima):
            np.testing.assert_array_equal(found, getattr(blocks, name), err_msg=name)


@pytest.mark.parametrize("kind", GRIDS, ids=lambda kind: kind.name)
def test_the_nearest_level_is_the_nearest(kind: Type) -> None:
    grid = GRIDS[kind]
    values = np.linspace(grid.levels[0] - 3, grid.levels[-1] + 3, 999, dtype=np.float32)
    off = np.abs(np.array(grid.levels)[:, None] - values).min(axis=0)
    np.testing.assert_allclose(np.abs(grid.codes(values) - values), off, atol=1e-5)


def made_up(kind: Type) -> Blocks:
    """Over all of a grid's range."""
    grid, rng = GRIDS[kind], np.random.default_rng(int(kind))
    subs, supers = WIDTH // grid.sub_block, WIDTH // grid.block

    def whole(first: int, last: int) -> np.ndarray:
        return rng.integers(first, last + 1, (subs, ROWS)).astype(np.float32)

    def f16() -> np.ndarray:
        return rng.standard_normal((supers, ROWS)).astype(np.float16).astype(np.float32)

    levels = rng.choice(np.array(grid.levels, np.float32), (WIDTH, ROWS))
    return Blocks(grid, levels, whole(*grid.scales), whole(0, grid.minima), f16(), f16())
