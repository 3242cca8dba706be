"""Transforms tensors' values from the checkpoint's form to llama.cpp's.

Reorderings move whole elements and work on any dtype, BF16 bit patterns included. Arithmetic is done in
float32.

Value heads of the gated delta net: the checkpoint groups them by key head (k0v0 k0v1 k1v0 k1v1). llama.cpp
broadcasts key heads over value heads in tiles and requires k0v0 k1v0 k0v1 k1v1 (llama.cpp,
src/models/qwen35.cpp). If there are as many key heads as value heads, the two orders are the same.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_serve.convert.config import ModelConfig

Array = npt.NDArray[Any]
Transform = Callable[[Array, ModelConfig], Array]


def tile_value_heads(values: Array, config: ModelConfig, head_rows: int) -> Array:
    """Reorders axis 0, of `linear_value_heads * head_rows` rows, from grouped to tiled value heads."""
    per_key = config.linear_value_heads // config.linear_key_heads
    heads = values.reshape(config.linear_key_heads, per_key, head_rows, -1)
    return heads.swapaxes(0, 1).reshape(values.shape)


def tile_heads(values: Array, config: ModelConfig) -> Array:
    """One row a value head: in_proj_a, in_proj_b, A_log, dt_bias."""
    return tile_value_heads(values, config, 1)


def tile_gate(values: Array, config: ModelConfig) -> Array:
    """`linear_value_dim` rows a value head: in_proj_z."""
    return tile_value_heads(values, config, config.linear_value_dim)


def tile_qkv(values: Array, config: ModelConfig) -> Array:
    """Rows are all of q, all of k, then v: only v's heads move. in_proj_qkv and the convolution."""
    qk_rows = 2 * config.linear_key_heads * config.linear_key_dim
    return np.concatenate([values[:qk_rows], tile_gate(values[qk_rows:], config)])


def tile_columns(values: Array, config: ModelConfig) -> Array:
    """The input columns of out_proj, which are value heads."""
    per_key = config.linear_value_heads // config.linear_key_heads
    heads = values.reshape(len(values), config.linear_key_heads, per_key, config.linear_value_dim)
    return heads.swapaxes(1, 2).reshape(values.shape)


def squeeze_conv(values: Array, config: ModelConfig) -> Array:
    """Depthwise kernels [channels, 1, width] become [channels, width], value channels tiled."""
    return tile_qkv(values.reshape(len(values), -1), config)


def add_one(values: Array, config: ModelConfig) -> Array:
    """Qwen3.5's norms are zero-centred, x * (1 + w); llama.cpp multiplies by the stored value."""
    return values + np.float32(1)


def decay(values: Array, config: ModelConfig) -> Array:
    """A_log becomes the decay rate itself, -exp(A_log), with its heads tiled.

    It is rounded once from float64, so the result does not depend on the platform's float32 exp.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # writing refuses values that are not finite
        return tile_heads(-np.exp(values.astype(np.float64)).astype(np.float32), config)
