"""Conversions between F32, F16 and BF16, and to Q8_0. numpy has no bfloat16, so arrays hold its bits as
uint16."""

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# bit patterns of BF16 without the sign: below the first a value is subnormal in F16, from the second on it
# overflows
_F16_MIN_NORMAL = np.uint16((127 - 14) << 7)
_F16_OVERFLOW = np.uint16((127 + 16) << 7)
_BIAS_SHIFT = np.uint16((127 - 15) << 10 & 0xFFFF)

_EXPONENT: dict[str, np.uint16 | np.uint32] = {
    "F16": np.uint16(0x7C00),
    "BF16": np.uint16(0x7F80),
    "F32": np.uint32(0x7F800000),
}
"""The exponent bits of a type, which are all set only in infinities and NaN."""


Q8_0_BLOCK = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_0][0]
"""Elements that share a scale; they are in one row."""


class RangeError(ValueError):
    """A finite value is too large for the target type."""


def first_not_finite(values: Array, kind: str) -> int | None:
    """Index of the first infinity or NaN in a flat array of F32, F16 or BF16; None if there is none."""
    mask = _EXPONENT[kind]
    exponents = values.view(mask.dtype) & mask
    if exponents.size == 0 or exponents.max() != mask:  # a quarter of the time of the search
        return None
    return int(np.argmax(exponents == mask))


def convert(values: Array, source: str, target: str) -> Array:
    """Converts between the types named F32, F16, BF16, to nearest, ties to even; or from them to Q8_0, as
    blocks of bytes.

    Raises:
        RangeError: a finite value overflows F16 or BF16, or a block's scale does.
    """
    if source == target:
        return values
    if target == "F16":
        return _bf16_to_f16(values) if source == "BF16" else _f32_to_f16(values)
    f32 = to_f32(values, source)
    if target == "Q8_0":
        return _f32_to_q8_0(f32)
    return f32 if target == "F32" else _f32_to_bf16(f32)


def to_f32(values: Array, source: str) -> npt.NDArray[np.float32]:
    """Widens F16 or BF16 to float32, exactly; F32 passes through."""
    if source == "BF16":
        wide = values.astype(np.uint32)
        wide <<= np.uint32(16)
        return wide.view(np.float32)
    return values.astype(np.float32, copy=False)


def _f32_to_f16(values: Array) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        half = values.astype(np.float16)
    _check_range(values, np.isinf(half), "F16's largest value, 65504")
    return half


def _f32_to_q8_0(values: npt.NDArray[np.float32]) -> Array:
    with np.errstate(over="ignore"):
        blocks: Array = gguf.quants.quantize(values.reshape(-1, Q8_0_BLOCK), gguf.GGMLQuantizationType.Q8_0)
    scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16)
    _check_range(
        values, np.repeat(np.isinf(scales.reshape(-1)), Q8_0_BLOCK), "what Q8_0's scales reach, 8.3e6"
    )
    return blocks.reshape(-1)


def _check_range(values: Array, infinite: npt.NDArray[np.bool_], largest: str) -> None:
    """Raises RangeError for finite values whose converted value is `infinite`."""
    if (infinite & np.isfinite(values)).any():
        raise RangeError(f"{np.abs(values[np.isfinite(values)]).max():g} is beyond {largest}")


def _bf16_to_f16(bits: Array) -> Array:
    """Changes the exponent's bias in 16-bit integers. This is exact, and faster than by way of 32 bits.

    F16 has the longer mantissa, so a value that is normal in F16 needs no rounding. The others (subnormals,
    zero, infinities, NaN) are a fraction of a percent of any weight matrix, and numpy converts them.
    """
    magnitude = bits & np.uint16(0x7FFF)
    # one comparison for both ends, since values below the range wrap around to above it
    odd = np.flatnonzero((magnitude - _F16_MIN_NORMAL) >= (_F16_OVERFLOW - _F16_MIN_NORMAL))
    magnitude <<= np.uint16(3)
    magnitude -= _BIAS_SHIFT
    magnitude |= bits & np.uint16(0x8000)
    half = magnitude.view(np.float16)
    if odd.size:
        half[odd] = _f32_to_f16(to_f32(bits[odd], "BF16"))
    return half


def _f32_to_bf16(values: npt.NDArray[np.float32]) -> Array:
    bits = values.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    out = (rounded >> np.uint32(16)).astype(np.uint16)
    if (nan := np.isnan(values)).any():  # rounding could turn a NaN into infinity: keep it as a quiet NaN
        out[nan] = (bits[nan] >> np.uint32(16)).astype(np.uint16) | np.uint16(0x0040)
    infinite = (out & np.uint16(0x7FFF)) == _EXPONENT["BF16"]
    if infinite.any():
        _check_range(values, infinite, "BF16's largest value, 3.38953e+38")
    return out
