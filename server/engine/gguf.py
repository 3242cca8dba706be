"""What a GGUF file says of itself: metadata and tensor sizes, read without llama.cpp and without the weights.

The memory plan needs both before anything is loaded, and a damaged file should be named as such. Format:
ggml-org/ggml, docs/gguf.md (version 3; version 2 has the same layout).
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import ModelLoadError
from .llama import row_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Scalar = int | float | bool | str
Value = Scalar | tuple[Scalar, ...] | None
"""None stands for an array of strings: nothing here reads a vocabulary."""

_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class Header:
    """`tensors` maps a name to its size in bytes."""

    metadata: Mapping[str, Value]
    tensors: Mapping[str, int]


def read_header(path: Path) -> Header:
    """Read the header of a GGUF file. Raises ModelLoadError when it is missing, damaged or cut short."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header(path)
    except FileNotFoundError:
        raise ModelLoadError(f"model: {path} does not exist") from None
    except IsADirectoryError:
        raise ModelLoadError(f"model: {path} is a folder; give the .gguf file itself") from None
    except OSError as error:
        raise ModelLoadError(f"model: {path} cannot be read: {error.strerror or error}") from error
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise ModelLoadError(f"model: {path} is not a whole GGUF file ({error})") from error


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def header(self, path: Path) -> Header:
        if self._data[:4] != b"GGUF":
            raise ModelLoadError(f"model: {path} is not a GGUF file (it starts with {self._data[:4]!r})")
        self._at = 4
        version = self._scalar(4)
        if version not in (2, 3):
            raise ModelLoadError(f"model: {path} has GGUF version {version}; versions 2 and 3 can be read")
        n_tensors, n_keys = int(self._scalar(10)), int(self._scalar(10))
        metadata: dict[str, Value] = {}
        for _ in range(n_keys):
            key = self._string()
            metadata[key] = self._value(int(self._scalar(4)))
        tensors: dict[str, int] = {}
        end = 0
        for _ in range(n_tensors):
            name = self._string()
            shape = [int(self._scalar(10)) for _ in range(int(self._scalar(4)))]
            ggml_type, offset = int(self._scalar(4)), int(self._scalar(10))
            size = row_bytes(ggml_type, shape[0])
            if not size:
                raise ModelLoadError(
                    f"model: {path}: tensor {name} has type {ggml_type}, unknown to this llama.cpp"
                )
            for rows in shape[1:]:
                size *= rows
            tensors[name] = size
            end = max(end, offset + size)
        alignment = metadata.get("general.alignment", 32)
        assert isinstance(alignment, int)
        missing = -(-self._at // alignment) * alignment + end - len(self._data)
        if missing > 0:
            raise ModelLoadError(f"model: {path} is cut short: {missing:,} bytes of weights are missing")
        return Header(metadata, tensors)

    def _scalar(self, kind: int) -> int | float | bool:
        layout = _SCALARS[kind]
        (value,) = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return value  # type: ignore[no-any-return]

    def _string(self) -> str:
        length = int(self._scalar(10))
        start, self._at = self._at, self._at + length
        if self._at > len(self._data):
            raise ValueError("a string reaches past its end")
        return self._data[start : self._at].decode("utf-8")

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise ValueError(f"value type {kind} does not exist")
            return self._scalar(kind)
        item, count = int(self._scalar(4)), int(self._scalar(10))
        if item == _STRING:
            for _ in range(count):
                self._at += 8 + int.from_bytes(self._data[self._at : self._at + 8], "little")
            if self._at > len(self._data):
                raise ValueError("an array reaches past its end")
            return None
        if item not in _SCALARS:
            raise ValueError(f"array type {item} does not exist")
        return tuple(self._scalar(item) for _ in range(count))
