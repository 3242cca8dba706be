"""Computes floats from a quantized weight's parts, as many rows as are asked for.

A `RowWise` weight has codes in rows as long as the weight's, and a scale for the tensor, each row, group of
columns or block: FP8, INT8, compressed-tensors' packed integers, FP4. `Words` are GPTQ's and AWQ's, which
pack codes of several rows into one word and are computed as a whole.

Sources: llama.cpp's conversion/base.py (`dequant_simple`, `dequant_gptq`, `dequant_packed`), AutoAWQ's
utils/packing_utils.py, compressed-tensors' compressors, of which `weight * scale` is computed in F32 here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qwen_serve.convert.errors import CheckpointError
from qwen_serve.convert.floats import to_f32
from qwen_serve.convert.safetensors import WEIGHT_TYPES, StoredTensor

WORD = 32
"""Bits of a word into which codes are packed."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The column of each of a word's eight codes, from the lowest bits on."""
WHOLE_KEPT = 2
"""Weights that are kept after they were computed as a whole, for the rest of their rows."""


@dataclass(frozen=True)
class Grid:
    """An integer grid: weight = scale * (code - zero), each [rows, columns]. Codes are from 0 on."""

    codes: NDArray[np.uint8]
    zeros: NDArray[np.uint8]
    scales: NDArray[np.float32]
    bits: int


class Weight(Protocol):
    """The computation of a weight, [rows, columns]."""

    @property
    def is_grid(self) -> bool: ...
    def rows(self, first: int, last: int) -> NDArray[np.float32]: ...
    def grid(self) -> Grid | None: ...


@dataclass(frozen=True, eq=False)
class Dequantized(StoredTensor):
    """A weight that is computed from its parts; `shape` is that of the weight."""

    weight: Weight

    def read(self, start: int = 0, count: int | None = None) -> NDArray[np.float32]:
        """Elements `start` to `start + count` of the flat weight; computes the rows that have them."""
        count = self.n_elements - start if count is None else count
        width = self.shape[-1]
        first, last = start // width, -(-(start + count) // width)
        if isinstance(self.weight, Words):
            first, values = 0, _whole(self.weight, self.n_elements // width)
        else:
            values = self.weight.rows(first, last)
        flat = values.reshape(-1)
        return flat[start - first * width :][:count]


@lru_cache(WHOLE_KEPT)
def _whole(weight: Words, n_rows: int) -> NDArray[np.float32]:
    return weight.rows(0, n_rows)


@dataclass(frozen=True, eq=False)
class Scales:
    """Scales of blocks of `height` rows and `width` columns, in matrices of `n_rows` rows, and one factor."""

    part: StoredTensor
    n_rows: int
    shape: tuple[int, int]
    """Blocks of a matrix along its rows and columns."""
    height: int
    width: int
    factor: np.float32 | None = None
    divides: bool = False
    """Whether `factor` divides, as compressed-tensors' global scale does."""

    def rows(self, first: int, last: int) -> NDArray[np.float32]:
        """[rows, blocks along columns]."""
        along, across = self.shape
        places = np.arange(first, last)
        places = places // self.n_rows * along + places % self.n_rows // self.height
        low, high = int(places[0]), int(places[-1]) + 1
        found = decoded(self.part, low * across, (high - low) * across).reshape(-1, across)
        if self.factor is not None:
            found = found / self.factor if self.divides else found * self.factor
        return found[places - low]

    def spread(self, rows: NDArray[Any], columns: int, g_idx: NDArray[Any] | None) -> NDArray[Any]:
        """[rows, columns] of [rows, blocks]."""
        if rows.shape[1] == 1:
            return np.broadcast_to(rows, (len(rows), columns))
        return rows[:, g_idx] if g_idx is not None else rows.repeat(self.width, 1)[:, :columns]


@dataclass(frozen=True, eq=False)
class RowWise:
    """Codes of whole rows times scales."""

    codes: StoredTensor
    n_rows: int
    columns: int
    unpack: Callable[[NDArray[Any]], NDArray[Any]]
    """[rows, stored columns] -> [rows, at least `columns`]."""
    scales: Scales
    bits: int | None = None
    """Bits of an integer code without a sign, whose middle stands for 0 unless there are zero points."""
    zeros: StoredTensor | None = None
    g_idx: StoredTensor | None = None

    @property
    def is_grid(self) -> bool:
        """Whether the codes are integers."""
        return self.bits is not None

    def rows(self, first: int, last: int) -> NDArray[np.float32]:
        values, zeros = self._codes(first, last), self._zeros(first, last)
        spread = self.scales.spread(self.scales.rows(first, last), self.columns, self._order())
        if zeros is not None:
            values = values.astype(np.int32) - zeros
        weight: NDArray[np.float32] = values.astype(np.float32) * spread
        return weight

    def grid(self) -> Grid | None:
        if self.bits is None:
            return None
        zeros = self._zeros(0, self.n_rows)
        assert zeros is not None, "an integer code has a middle"
        spread = self.scales.spread(self.scales.rows(0, self.n_rows), self.columns, self._order())
        shape = (self.n_rows, self.columns)
        return Grid(
            self._codes(0, self.n_rows).astype(np.uint8),
            np.broadcast_to(zeros, shape).astype(np.uint8),
            spread,
            self.bits,
        )

    def _codes(self, first: int, last: int) -> NDArray[Any]:
        width = self.codes.shape[-1]
        stored = decoded(self.codes, first * width, (last - first) * width)
        return self.unpack(stored.reshape(last - first, width))[:, : self.columns]

    def _order(self) -> NDArray[np.int64] | None:
        return None if self.g_idx is None else self.g_idx.read().astype(np.int64)

    def _zeros(self, first: int, last: int) -> NDArray[np.int32] | None:
        """What is subtracted from each code; None for codes with a sign of their own."""
        if self.bits is None:
            return None
        if self.zeros is None:
            return np.full((last - first, 1), 2 ** (self.bits - 1), np.int32)
        groups = self.zeros.shape[-1]
        words = self.zeros.read().reshape(-1, groups)
        per_word = WORD // self.bits
        low = first // per_word
        wanted = words[low : -(-last // per_word)]
        points = np.moveaxis(unpacked(wanted, self.bits), -1, 1).reshape(-1, groups)
        rows = points[first - low * per_word : last - low * per_word].astype(np.int32)
        return self.scales.spread(rows, self.columns, self._order())


@dataclass(frozen=True, eq=False)
class Words:
    """GPTQ and AWQ: codes [in, out], with zero points and scales [groups, out]."""

    weight: StoredTensor
    zeros: StoredTensor
    scales: StoredTensor
    g_idx: StoredTensor | None
    bits: int
    offset: int
    """What the file's format subtracts from zero points."""
    awq: bool

    is_grid = True

    def rows(self, first: int, last: int) -> NDArray[np.float32]:
        codes, zeros, scales = self._parts()
        weight: NDArray[np.float32] = scales * (codes - zeros).astype(np.float32)
        return np.ascontiguousarray(weight.T[first:last])

    def grid(self) -> Grid | None:
        codes, zeros, scales = self._parts()
        if zeros.max(initial=0) > 255:  # a zero point of 255 + 1
            return None
        turned = (np.ascontiguousarray(part.T) for part in (codes, zeros, scales))
        low, points, steps = turned
        return Grid(low.astype(np.uint8), points.astype(np.uint8), steps.astype(np.float32), self.bits)

    def _parts(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Codes, zero points and scales, [in, out].

        Raises:
            CheckpointError: an unknown group.
        """
        scales = decoded(self.scales).reshape(self.scales.shape)
        words = self.weight.read().reshape(self.weight.shape)
        points = self.zeros.read().reshape(self.zeros.shape)
        codes: NDArray[Any]
        zeros: NDArray[Any]
        if self.awq:
            codes, zeros = (unpacked(w, 4)[..., AWQ_ORDER].reshape(len(w), -1) for w in (words, points))
        else:
            codes = np.moveaxis(unpacked(words, self.bits), -1, 1).reshape(-1, scales.shape[1])
            zeros = unpacked(points, self.bits).reshape(scales.shape) + self.offset
        groups = np.arange(len(codes)) // (len(codes) // len(scales))
        if self.g_idx is not None:
            groups = self.g_idx.read().astype(np.int64)
            if groups.shape != (len(codes),) or groups.min() < 0 or groups.max() >= len(scales):
                raise CheckpointError(
                    f"{self.g_idx.path}: {self.g_idx.name} must give each of {len(codes)} rows one of "
                    f"{len(scales)} groups"
                )
        return codes, zeros[groups], scales[groups]


def unpacked(words: NDArray[np.int32], bits: int) -> NDArray[Any]:
    """[..., codes of a word], the lowest bits first."""
    shifts = np.arange(0, WORD, bits, dtype=np.int32)
    return (words[..., None] >> shifts) & np.int32(2**bits - 1)


def unpacked_rows(words: NDArray[np.int32], bits: int) -> NDArray[Any]:
    """[rows, codes] of words packed along a row."""
    return unpacked(words, bits).reshape(len(words), -1)


def from_fp4(packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    """[rows, columns] of FP4 E2M1, two to a byte, the low half first."""
    halves: NDArray[np.uint8] = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
    values: NDArray[np.float32] = E2M1[halves]
    return values


def signed(codes: NDArray[np.int8]) -> NDArray[np.int8]:
    """Codes that are their own values."""
    return codes


def unsigned(codes: NDArray[np.int8]) -> NDArray[np.int32]:
    """INT8 codes from 0 on, with the middle at 128."""
    return codes.astype(np.int32) + 128


def decoded(part: StoredTensor, start: int = 0, count: int | None = None) -> NDArray[Any]:
    """A part's elements: floats of any kind as F32, integers and packed ones as they are."""
    values = part.read(start, count)
    if part.dtype in SMALL_FLOATS:
        small: NDArray[np.float32] = SMALL_FLOATS[part.dtype][values]
        return small
    return to_f32(values, part.dtype) if part.dtype in WEIGHT_TYPES else values


def _small_floats(exponent_bits: int, mantissa_bits: int) -> NDArray[np.float32]:
    """Every value of a small float type by its bits, with infinities as in IEEE 754."""
    bias, steps = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    codes = np.arange(2 ** (1 + exponent_bits + mantissa_bits))
    exponent, mantissa = (codes >> mantissa_bits) & (2**exponent_bits - 1), codes & (steps - 1)
    sizes = np.where(
        exponent > 0,
        (steps + mantissa) * 2.0 ** (exponent - bias - mantissa_bits),
        mantissa * 2.0 ** (1 - bias - mantissa_bits),
    )
    values: NDArray[np.float32] = np.where(codes < len(codes) // 2, sizes, -sizes).astype(np.float32)
    return values


def _e4m3() -> NDArray[np.float32]:
    """With NaN, without infinities."""
    values = _small_floats(4, 3)
    values[[127, 255]] = np.nan
    return values


def _e5m2() -> NDArray[np.float32]:
    values = _small_floats(5, 2)
    values[[124, 252]] = np.inf, -np.inf
    values[[125, 126, 127, 253, 254, 255]] = np.nan
    return values


def _e8m0() -> NDArray[np.float32]:
    """Powers of two, and NaN; the least is subnormal in F32."""
    values = np.append(2.0 ** (np.arange(255) - 127), np.nan)
    return values.astype(np.float32)


E4M3, E5M2, E8M0, E2M1 = _e4m3(), _e5m2(), _e8m0(), _small_floats(2, 1)
SMALL_FLOATS = {"F8_E4M3": E4M3, "F8_E5M2": E5M2, "F8_E8M0": E8M0}
"""safetensors' names of types of 8 bits, and their values."""
