"""The head of a GGUF file: its tensor table, and those key-value pairs that are one value.

gguf's own reader makes an array of every token and every merge: half a minute for the official vocabulary.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from qwen_serve.convert.errors import ConvertError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"
NUMBERS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
"""By struct's letters."""

Value = str | int | float


@dataclass(frozen=True)
class TensorInfo:
    """One row of the table; `shape` is in ggml's order, the row's length first, `offset` the place of its
    data in the file, in bytes, which does not tell tensors apart."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int = field(default=0, compare=False, repr=False)

    @property
    def n_elements(self) -> int:
        return prod(self.shape)

    @property
    def n_bytes(self) -> int:
        block, n_bytes = GGML_QUANT_SIZES[self.type]
        return self.n_elements // int(block) * int(n_bytes)


@dataclass(frozen=True)
class Head:
    """All before the data: values by key, of an array its length, and the tensors in the file's order."""

    values: Mapping[str, Value]
    tensors: list[TensorInfo]


def read_tensors(path: Path) -> list[TensorInfo]:
    """The tensors of a GGUF file in the order of its table.

    Raises:
        ConvertError: as `read_head`.
    """
    return read_head(path).tensors


def read_head(path: Path) -> Head:
    """What stands before the data of a GGUF file.

    Raises:
        ConvertError: not a GGUF file, of a version that is not known, or cut short.
    """
    with path.open("rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Cursor(data).head()
        except (ValueError, struct.error) as error:
            raise ConvertError(f"{path}: not a whole GGUF file ({error})") from None


class _Cursor:
    """Walks the header from the front; numbers are little-endian."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._position = data, 0

    def head(self) -> Head:
        if self._data[:4] != MAGIC:
            raise ValueError(f"it starts with {self._data[:4]!r}, not {MAGIC!r}")
        self._position = 4
        if (version := self._number("I")) not in VERSIONS:
            raise ValueError(f"version {version}; known are {VERSIONS[0]} and {VERSIONS[1]}")
        n_tensors, n_keys = self._number("Q"), self._number("Q")
        values = {self._string(): self._value(GGUFValueType(self._number("I"))) for _ in range(n_keys)}
        tensors = [self._tensor() for _ in range(n_tensors)]
        alignment = int(values.get(ALIGNMENT, GGUF_DEFAULT_ALIGNMENT)) or 1
        data_start = -(-self._position // alignment) * alignment
        return Head(values, [replace(tensor, offset=data_start + tensor.offset) for tensor in tensors])

    def _tensor(self) -> TensorInfo:
        name = self._string()
        shape = tuple(self._number("Q") for _ in range(self._number("I")))
        kind = GGMLQuantizationType(self._number("I"))
        return TensorInfo(name, shape, kind, self._number("Q"))

    def _number(self, code: str) -> int:
        return int(self._unpack(code))

    def _unpack(self, code: str) -> int | float:
        (value,) = struct.unpack_from("<" + code, self._data, self._position)
        self._position += struct.calcsize("<" + code)
        number: int | float = value
        return number

    def _string(self) -> str:
        length = self._number("Q")
        self._position += length
        return self._data[self._position - length : self._position].decode(errors="replace")

    def _value(self, kind: GGUFValueType) -> Value:
        if kind == GGUFValueType.STRING:
            return self._string()
        return self._array() if kind == GGUFValueType.ARRAY else self._unpack(NUMBERS[kind])

    def _array(self) -> int:
        """Its length; what is in it is passed over."""
        kind, count = GGUFValueType(self._number("I")), self._number("Q")
        if kind in NUMBERS:
            self._position += count * struct.calcsize("<" + NUMBERS[kind])
            return count
        for _ in range(count):
            if kind == GGUFValueType.STRING:  # a quarter of a million tokens, and as many merges
                self._position += 8 + struct.unpack_from("<Q", self._data, self._position)[0]
            else:
                self._array()
        return count
