"""Conversions between float types, against numpy's and gguf's for every bit pattern."""

import gguf
import numpy as np
import pytest

from qwen_serve.convert.floats import RangeError, convert, first_not_finite, to_f32

EVERY_BF16 = np.arange(1 << 16, dtype=np.uint16)


def test_every_bf16_that_f16_can_hold_converts_as_through_f32() -> None:
    through_f32 = to_f32(EVERY_BF16, "BF16")
    fits = ~((np.abs(through_f32) > 65504) & np.isfinite(through_f32))
    with np.errstate(invalid="ignore"):
        expected = through_f32[fits].astype(np.float16)
    converted = convert(EVERY_BF16[fits], "BF16", "F16")
    np.testing.assert_array_equal(converted.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("value", [65536.0, -65536.0, 3e38])
@pytest.mark.parametrize("source", ["F32", "BF16"])
def test_a_value_beyond_f16_is_refused(value: float, source: str) -> None:
    values = convert(np.array([0.5, value], dtype=np.float32), "F32", source)
    with pytest.raises(RangeError, match="65504"):
        convert(values, source, "F16")


@pytest.mark.parametrize("value", [3.4e38, -3.4e38])
def test_a_value_beyond_bf16_is_refused(value: float) -> None:
    with pytest.raises(RangeError, match=r"3\.4e\+38 is beyond BF16's largest value, 3\.38953e\+38"):
        convert(np.array([0.5, value], dtype=np.float32), "F32", "BF16")


@pytest.mark.parametrize("kind", ["F16", "BF16", "F32"])
def test_what_is_not_finite_is_found(kind: str) -> None:
    for bits in EVERY_BF16[:: 1 if kind == "BF16" else 64]:
        values = np.zeros(3, np.uint32 if kind == "F32" else np.uint16)
        values[1] = np.uint32(bits) << np.uint32(16) if kind == "F32" else bits
        values = values.view(np.float16) if kind == "F16" else values
        values = values.view(np.float32) if kind == "F32" else values
        finite = bool(np.isfinite(to_f32(values, kind)).all())
        assert first_not_finite(values, kind) == (None if finite else 1), hex(int(bits))
    assert first_not_finite(values[:0], kind) is None


def test_infinity_stays_infinity() -> None:
    values = np.array([np.inf, -np.inf], dtype=np.float32)
    assert convert(values, "F32", "F16").tolist() == [np.inf, -np.inf]


def test_f32_rounds_to_bf16_as_gguf_rounds_it() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    halfway = (EVERY_BF16.astype(np.uint32) << np.uint32(16)) | np.uint32(0x8000)  # ties
    values = np.concatenate([bits, halfway]).view(np.float32)
    values = values[~((np.abs(values) >= 3.3961775e38) & np.isfinite(values))]  # which it makes infinite
    expected = gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16).view(np.uint16)
    np.testing.assert_array_equal(convert(values, "F32", "BF16"), expected)
