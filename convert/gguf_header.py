"""The tensor table of a GGUF file, read without the key-value pairs before it.

gguf's own reader makes an array of every token and every merge: half a minute for the official vocabulary.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from convert.errors import ConvertError

if TYPE_CHECKING:
    from pathlib import Path

MAGIC = b"GGUF"
VERSIONS = (2, 3)
VALUE_BYTES = {
    GGUFValueType.UINT8: 1,
    GGUFValueType.INT8: 1,
    GGUFValueType.BOOL: 1,
    GGUFValueType.UINT16: 2,
    GGUFValueType.INT16: 2,
    GGUFValueType.UINT32: 4,
    GGUFValueType.INT32: 4,
    GGUFValueType.FLOAT32: 4,
    GGUFValueType.UINT64: 8,
    GGUFValueType.INT64: 8,
    GGUFValueType.FLOAT64: 8,
}


@dataclass(frozen=True)
class TensorInfo:
    """One row of the table; `shape` is in ggml's order, the row's length first."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType

    @property
    def n_elements(self) -> int:
        return prod(self.shape)

    @property
    def n_bytes(self) -> int:
        block, n_bytes = GGML_QUANT_SIZES[self.type]
        return self.n_elements // int(block) * int(n_bytes)


def read_tensors(path: Path) -> list[TensorInfo]:
    """The tensors of a GGUF file in the order of its table.

    Raises:
        ConvertError: not a GGUF file, of a version that is not known, or cut short.
    """
    with path.open("rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Cursor(data).tensors()
        except (ValueError, struct.error) as error:
            raise ConvertError(f"{path}: not a whole GGUF file ({error})") from None


class _Cursor:
    """Walks the header from the front; numbers are little-endian."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._position = data, 0

    def tensors(self) -> list[TensorInfo]:
        if self._data[:4] != MAGIC:
            raise ValueError(f"it starts with {self._data[:4]!r}, not {MAGIC!r}")
        self._position = 4
        if (version := self._number("I")) not in VERSIONS:
            raise ValueError(f"version {version}; known are {VERSIONS[0]} and {VERSIONS[1]}")
        n_tensors, n_keys = self._number("Q"), self._number("Q")
        for _ in range(n_keys):
            self._skip_string()
            self._skip_value(GGUFValueType(self._number("I")))
        return [self._tensor() for _ in range(n_tensors)]

    def _tensor(self) -> TensorInfo:
        length = self._number("Q")
        name = self._data[self._position : self._position + length].decode()
        self._position += length
        shape = tuple(self._number("Q") for _ in range(self._number("I")))
        kind = GGMLQuantizationType(self._number("I"))
        self._number("Q")  # its offset
        return TensorInfo(name, shape, kind)

    def _number(self, code: str) -> int:
        (value,) = struct.unpack_from("<" + code, self._data, self._position)
        self._position += struct.calcsize("<" + code)
        return int(value)

    def _skip_string(self) -> None:
        self._position += 8 + struct.unpack_from("<Q", self._data, self._position)[0]

    def _skip_value(self, kind: GGUFValueType) -> None:
        if kind == GGUFValueType.STRING:
            self._skip_string()
        elif kind == GGUFValueType.ARRAY:
            self._skip_array()
        else:
            self._position += VALUE_BYTES[kind]

    def _skip_array(self) -> None:
        kind, count = GGUFValueType(self._number("I")), self._number("Q")
        if kind in VALUE_BYTES:
            self._position += count * VALUE_BYTES[kind]
            return
        for _ in range(count):
            self._skip_value(kind)
