"""Each transform against loops over heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from qwen_serve.convert.config import ModelConfig
from qwen_serve.convert.transforms import (
    add_one,
    decay,
    squeeze_conv,
    tile_columns,
    tile_gate,
    tile_heads,
    tile_qkv,
)
from tests.checkpoints import KEY_HEADS, LINEAR_DIM, VALUE_HEADS, model_config

PER_KEY = VALUE_HEADS // KEY_HEADS
# new place -> old place: the first value head of every key head, then the second of each, ...
TILED = [key * PER_KEY + i for i in range(PER_KEY) for key in range(KEY_HEADS)]
QK_ROWS = 2 * KEY_HEADS * LINEAR_DIM


@pytest.fixture
def config() -> ModelConfig:
    return ModelConfig.from_json(model_config())


def numbered(*shape: int) -> npt.NDArray[Any]:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_the_orders_differ_here() -> None:
    assert TILED == [0, 3, 1, 4, 2, 5]


def test_one_row_a_head(config: ModelConfig) -> None:
    rows = numbered(VALUE_HEADS, 5)
    np.testing.assert_array_equal(tile_heads(rows, config), rows[TILED])


def test_a_vector_of_heads(config: ModelConfig) -> None:
    assert tile_heads(numbered(VALUE_HEADS), config).tolist() == TILED


def test_gate_rows_move_with_their_head(config: ModelConfig) -> None:
    rows = numbered(VALUE_HEADS * LINEAR_DIM, 3)
    tiled = tile_gate(rows, config)
    for new, old in enumerate(TILED):
        np.testing.assert_array_equal(
            tiled[new * LINEAR_DIM : (new + 1) * LINEAR_DIM], rows[old * LINEAR_DIM : (old + 1) * LINEAR_DIM]
        )


def test_only_the_values_of_qkv_move(config: ModelConfig) -> None:
    rows = numbered(QK_ROWS + VALUE_HEADS * LINEAR_DIM, 3)
    tiled = tile_qkv(rows, config)
    np.testing.assert_array_equal(tiled[:QK_ROWS], rows[:QK_ROWS])
    np.testing.assert_array_equal(tiled[QK_ROWS:], tile_gate(rows[QK_ROWS:], config))


def test_the_convolution_loses_its_middle_axis_and_is_reordered_like_qkv(config: ModelConfig) -> None:
    kernels = numbered(QK_ROWS + VALUE_HEADS * LINEAR_DIM, 1, 4)
    np.testing.assert_array_equal(squeeze_conv(kernels, config), tile_qkv(kernels[:, 0], config))


def test_columns_of_the_output_projection_move(config: ModelConfig) -> None:
    weights = numbered(7, VALUE_HEADS * LINEAR_DIM)
    np.testing.assert_array_equal(tile_columns(weights, config), tile_gate(weights.T, config).T)


def test_zero_centred_norms_get_one_added() -> None:
    values = np.array([-1.0, 0.0, 0.25], dtype=np.float32)
    added = add_one(values, ModelConfig.from_json(model_config()))
    assert added.tolist() == [0.0, 1.0, 1.25]
    assert added.dtype == np.float32


def test_decay_is_minus_exp_in_tiled_order(config: ModelConfig) -> None:
    logs = np.log(np.arange(1, VALUE_HEADS + 1, dtype=np.float64)).astype(np.float32)
    rates = decay(logs, config)
    assert rates.dtype == np.float32
    np.testing.assert_allclose(rates, [-(old + 1) for old in TILED], rtol=1e-6)


@pytest.mark.parametrize("transform", [tile_heads, tile_gate, tile_qkv, tile_columns])
def test_nothing_moves_with_one_value_head_a_key_head(transform: Any) -> None:
    even = ModelConfig.from_json(model_config(linear_num_key_heads=4, linear_num_value_heads=4))
    size = 3 * 4 * LINEAR_DIM
    weights = numbered(size, 4 * LINEAR_DIM)
    weights = weights[: 4 * LINEAR_DIM] if transform is not tile_qkv else weights
    np.testing.assert_array_equal(transform(weights, even), weights)
