"""Packs blocks into the bytes of a GGUF file and unpacks them: the layouts of ggml-common.h."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from gguf.quants import IQ4_NL
from numpy.typing import NDArray

from qwen_serve.convert.compensation.arrays import on_host
from qwen_serve.convert.compensation.grids import GRIDS, Blocks

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def pack(kind: Type, blocks: Blocks) -> Bytes:
    """[rows, bytes of a row]."""
    grid, rows = blocks.grid, blocks.d.shape[1]
    each = grid.block // grid.sub_block
    levels = on_host(blocks.levels.T, np.int16).reshape(-1, grid.block)
    scales = on_host(blocks.scales.T, np.int32).reshape(-1, each)
    minima = on_host(blocks.minima.T, np.int32).reshape(-1, each)
    d, dmin = (on_host(f16.T, np.float16).reshape(-1, 1).view(np.uint8) for f16 in (blocks.d, blocks.dmin))
    match kind:
        case Type.Q2_K:
            parts = [scales | minima << 4, _fold(levels, 32, 2), d, dmin]
        case Type.Q3_K:
            codes, signed = levels + 4, scales + 32
            low = _fold(signed & 15, 8, 4)
            high = _fold(signed >> 4, 4, 2)
            parts = [_fold(codes >> 2, 32, 1), _fold(codes & 3, 32, 2), low, high, d]
        case Type.Q4_K:
            parts = [d, dmin, _scales_and_minima(scales, minima), _fold(levels, 32, 4)]
        case Type.Q5_K:
            high = _fold(levels >> 4, 32, 1)
            parts = [d, dmin, _scales_and_minima(scales, minima), high, _fold(levels & 15, 32, 4)]
        case Type.Q6_K:
            codes = levels + 32
            parts = [_fold(codes & 15, 64, 4), _fold(codes >> 4, 32, 2), scales & 255, d]
        case Type.Q8_0:
            parts = [d, levels & 255]
        case Type.IQ4_XS:
            codes, signed = np.searchsorted(np.array(IQ4_NL.kvalues), levels), scales + 32
            spread = ((signed >> 4) << (2 * np.arange(8))).sum(axis=1, keepdims=True)
            pairs = signed[:, 0::2] & 15 | (signed[:, 1::2] & 15) << 4
            parts = [d, spread & 255, spread >> 8, pairs, _fold(codes, 16, 4)]
        case _:
            raise ValueError(f"no layout of {kind.name} is known here")
    return _bytes(parts).reshape(rows, -1)


def unpack(kind: Type, data: Bytes) -> Blocks:
    """The blocks in `data` [rows, bytes of a row]: integers as int8, `d` and `dmin` as float32."""
    grid = GRIDS[kind]
    each = grid.block // grid.sub_block
    rows, flat = len(data), data.reshape(-1, int(GGML_QUANT_SIZES[kind][1]))
    scales: NDArray[Any] = np.ones((len(flat), each), np.int8)
    minima: NDArray[Any] = np.zeros((len(flat), each), np.int8)
    d, dmin = flat[:, -2:], np.zeros((len(flat), 2), np.uint8)
    codes: NDArray[Any]
    first = 0  # the level of code 0
    match kind:
        case Type.Q2_K:
            scales, minima, d, dmin = flat[:, :16] & 15, flat[:, :16] >> 4, flat[:, 80:82], flat[:, 82:]
            codes = _unfold(flat[:, 16:80], 32, 2)
        case Type.Q3_K:
            first, low, high = -4, flat[:, 96:104], flat[:, 104:108]
            codes = _unfold(flat[:, 32:96], 32, 2) | _unfold(flat[:, :32], 32, 1) << 2
            scales = (_unfold(low, 8, 4) | _unfold(high, 4, 2) << 4) - 32
        case Type.Q4_K | Type.Q5_K:
            d, dmin, packed, halves = flat[:, :2], flat[:, 2:4], flat[:, 4:16], flat[:, -128:]
            low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
            scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=1)
            minima = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=1)
            codes = _unfold(halves, 32, 4)
            if kind == Type.Q5_K:
                codes |= _unfold(flat[:, 16:48], 32, 1) << 4
        case Type.Q6_K:
            first, scales = -32, flat[:, 192:208]
            codes = _unfold(flat[:, :128], 64, 4) | _unfold(flat[:, 128:192], 32, 2) << 4
        case Type.Q8_0:
            d, codes = flat[:, :2], flat[:, 2:]
        case Type.IQ4_XS:
            d, spread, pairs = flat[:, :2], flat[:, 2:4], flat[:, 4:8]
            low = np.stack([pairs & 15, pairs >> 4], axis=2).reshape(-1, each)
            scales = (low | _unfold(spread, 1, 2) << 4) - 32
            codes = np.array(IQ4_NL.kvalues, np.int8)[_unfold(flat[:, 8:], 16, 4)]
        case _:
            raise ValueError(f"no layout of {kind.name} is known here")

    def upright(values: NDArray[Any], dtype: type[np.generic]) -> NDArray[Any]:
        return np.ascontiguousarray(values.astype(dtype).reshape(rows, -1).T)

    def f16(values: NDArray[Any]) -> NDArray[Any]:
        return upright(np.ascontiguousarray(values).view(np.float16), np.float32)

    levels = codes.astype(np.int8) + np.int8(first)
    levels, scales, minima = (upright(values, np.int8) for values in (levels, scales, minima))
    return Blocks(grid, levels, scales, minima, f16(d), f16(dmin))


def _unfold(data: Bytes, run: int, bits: int) -> Bytes:
    """[blocks, codes]: the inverse of `_fold`."""
    shifts = bits * np.arange(8 // bits, dtype=np.uint8)[:, None]
    codes = data.reshape(len(data), -1, 1, run) >> shifts & np.uint8(2**bits - 1)
    return codes.reshape(len(data), -1)


def _fold(codes: NDArray[Any], run: int, bits: int) -> Bytes:
    """[blocks, bytes]: overlays runs of codes, the first of each 8 / bits in the lowest bits."""
    blocks = len(codes)
    stacked = codes.reshape(blocks, -1, 8 // bits, run)
    shifts = bits * np.arange(8 // bits, dtype=np.uint8)[:, None]
    folded: Bytes = np.bitwise_or.reduce(stacked.astype(np.uint8) << shifts, axis=2)
    return folded.reshape(blocks, -1)


def _scales_and_minima(scales: NDArray[np.int32], minima: NDArray[np.int32]) -> NDArray[np.int32]:
    """[blocks, 12]: six bits each; the high bits of the last four of both are stored above the first four."""
    first, last = slice(0, 4), slice(4, 8)
    return np.concatenate(
        [
            scales[:, first] | (scales[:, last] >> 4) << 6,
            minima[:, first] | (minima[:, last] >> 4) << 6,
            scales[:, last] & 15 | (minima[:, last] & 15) << 4,
        ],
        axis=1,
    )


def _bytes(parts: Sequence[NDArray[Any]]) -> Bytes:
    return np.concatenate([part.astype(np.uint8) for part in parts], axis=1)
