"""Reads a GGUF file's metadata and tensor table without loading the file.

gguf's own reader creates an array for every token and every merge, which takes half a minute for the official
vocabulary, and does not say what is wrong with a damaged file. Format: ggml-org/ggml, docs/gguf.md (version
3; version 2 has the same layout).
"""

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from qwen_serve.common.files import open_regular

from .devices import row_bytes, type_name
from .errors import ModelLoadError

Scalar = int | float | bool | str
Value = Scalar | tuple[Scalar, ...] | None
"""None stands for an array of strings, or of more than LONGEST_ARRAY numbers, such as a vocabulary."""

LONGEST_ARRAY = 2**16

_SCALARS = dict(enumerate("BbHhIif?", start=0)) | {10: "Q", 11: "q", 12: "d"}
"""Value type -> its code in the `struct` module."""
_U32, _STRING, _ARRAY, _U64 = 4, 8, 9, 10
_KINDS = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64")
"""Names of the value types, by number."""

MAX_DIMENSIONS = 4
"""`GGML_MAX_DIMS`."""

SPLIT_COUNT, SPLIT_NUMBER, SPLIT_TENSORS = "split.count", "split.no", "split.tensors.count"
"""Keys of a split model's part: number of parts, number of this one (from 0), and tensors in all of them."""

ALIGNMENT = 32
"""Alignment of tensor data in bytes, unless `general.alignment` sets another."""

I64 = 27
"""`GGML_TYPE_I64`, the type of tensors that are tables of ids."""

MAX_INTEGER = 2**31 - 1
"""Largest size: llama.cpp stores many in signed 32 bits."""

_KEY = 8 + 1 + 4 + 1
"""Least bytes of a key and its value: a name's length, a name, a type, a value."""
_TENSOR = 8 + 1 + 4 + 8 + 4 + 8
"""Least bytes of a tensor's entry: a name's length, a name, a rank, a dimension, a type, an offset."""


@dataclass(frozen=True)
class TensorInfo:
    """An entry of the tensor table. `shape` is in ggml's order, the row's length first; `type` is ggml's
    number."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int = field(default=0, compare=False, repr=False)
    """Offset of its data in the file, in bytes; ignored in comparisons."""

    @property
    def n_elements(self) -> int:
        return prod(self.shape)

    @property
    def n_bytes(self) -> int:
        return row_bytes(self.type, self.shape[0]) * prod(self.shape[1:])

    @property
    def type_name(self) -> str:
        """The type's name in recipes and gguf-py: Q4_K."""
        return type_name(self.type)


@dataclass(frozen=True)
class Header:
    """A file's metadata and tensors, in the file's order."""

    path: Path
    status: os.stat_result
    """Status of the file when it was read."""
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]
    setting: str = ""
    """The setting that names the file, for messages."""
    lengths: Mapping[str, int] = field(default_factory=dict)
    """Lengths of the metadata's arrays."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Types of the metadata's values: `u32`, of arrays `[u32]`."""
    tables: Mapping[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    """The I64 tensors, whole and flat."""
    keys_end: int = 0
    """Offset in bytes at which the metadata ends and the tensor table begins."""

    @property
    def name(self) -> str:
        """The file's name in messages."""
        return _named(self.path, self.setting)


class Metadata:
    """The keys of a file under a prefix, checked; names as in gguf-py's constants.py."""

    def __init__(self, header: Header, prefix: str) -> None:
        self._header, self._prefix = header, prefix

    def get(self, key: str) -> Value:
        """The value, unchecked."""
        return self._header.metadata.get(f"{self._prefix}.{key}")

    def integer(
        self, key: str, default: int | None = None, *, least: int = 0, most: int = MAX_INTEGER
    ) -> int:
        """An integer. Raises ModelLoadError if it is missing without a default, or not an integer from
        `least` to `most`."""
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or not least <= value <= most:
            raise self.unusable(key, f"an integer from {least:,} to {most:,}")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """One or more integers of at least 0. Raises ModelLoadError."""
        value = self.get(key)
        values = value if isinstance(value, tuple) else () if value is None else (value,)
        found = tuple(int(v) for v in values if isinstance(v, int) and 0 <= v <= MAX_INTEGER)
        if not found or len(found) != len(values):
            raise self.unusable(key, f"integers from 0 to {MAX_INTEGER:,}")
        return found

    def relate(self, key: str, ok: bool, wanted: str) -> None:
        """Raises ModelLoadError, saying what is `wanted` of a key, unless `ok`."""
        if not ok:
            raise self.unusable(key, wanted)

    def unusable(self, key: str, wanted: str) -> ModelLoadError:
        """An error that says what a key's value should be."""
        value = self.get(key)
        given = "it is missing" if value is None else f"it is {value!r:.60}"
        return ModelLoadError(
            f"{self._header.name}: its metadata has no usable {self._prefix}.{key} ({given}); "
            f"it must be {wanted}"
        )


def read_header(path: Path, setting: str = "") -> Header:
    """Read the header of a GGUF file, which the setting `setting` may name.

    Raises ModelLoadError if it is missing, damaged or cut short.
    """
    name = _named(path, setting)
    try:
        with (
            os.fdopen(open_regular(path), "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _Reader(data, name).header(path, os.fstat(file.fileno()), setting)
    except FileNotFoundError:
        raise ModelLoadError(f"{name} does not exist") from None
    except IsADirectoryError:
        raise ModelLoadError(f"{name} is a folder; give the .gguf file itself") from None
    except OSError as error:
        raise ModelLoadError(f"{name} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelLoadError(f"{name} is not a whole GGUF file ({error})") from error


def read_model(path: Path, setting: str = "") -> Header:
    """`read_header` of a model. If `path` is the first of several parts (`NAME-00001-of-00003.gguf`), which
    llama.cpp finds by their names, it has the tensors of all parts; offsets are those in the parts.

    Raises ModelLoadError also if `path` is a later part, or a part is missing or belongs to another model.
    """
    header = read_header(path, setting)
    count, number = header.metadata.get(SPLIT_COUNT, 0), header.metadata.get(SPLIT_NUMBER, 0)
    if not isinstance(count, int) or count < 2:
        return header
    name, end = _named(path, setting), f"-{1:05}-of-{count:05}.gguf"
    if number != 0:
        raise ModelLoadError(f"{name} is part {number} (from 0) of {count}; name the first, ...{end}")
    if not path.name.endswith(end):
        raise ModelLoadError(f"{name} is the first of {count} parts; its name must end in {end}")
    stem, tensors = path.name.removesuffix(end), dict(header.tensors)
    for part in range(1, count):
        other = read_header(path.with_name(f"{stem}-{part + 1:05}-of-{count:05}.gguf"), setting)
        if (other.metadata.get(SPLIT_NUMBER), other.metadata.get(SPLIT_COUNT)) != (part, count):
            raise ModelLoadError(f"{other.name} is not part {part} (from 0) of {count}")
        tensors |= other.tensors
    if len(tensors) != (total := header.metadata.get(SPLIT_TENSORS)):
        raise ModelLoadError(f"{name}: the {count} parts have {len(tensors)} tensors, not {total}")
    return replace(header, tensors=tensors)


def _named(path: Path, setting: str) -> str:
    return f"{setting}: {path}" if setting else str(path)


class _Reader:
    """Reads on from `_at`; every count is checked against the bytes left.

    ValueError says what is wrong, and where.
    """

    def __init__(self, data: mmap.mmap, file: str) -> None:
        """`file` is its name in messages."""
        self._data, self._file, self._at = data, file, 0

    def header(self, path: Path, status: os.stat_result, setting: str) -> Header:
        if self._data[:4] != b"GGUF":
            raise ModelLoadError(f"{self._file} is not a GGUF file (it starts with {self._data[:4]!r})")
        self._at = 4
        version = self._integer(_U32)
        if version not in (2, 3):
            raise ModelLoadError(f"{self._file} has GGUF version {version}; versions 2 and 3 can be read")
        n_tensors, n_keys = self._count(_TENSOR, "tensors"), self._count(_KEY, "metadata keys")
        metadata: dict[str, Value] = {}
        lengths: dict[str, int] = {}
        kinds: dict[str, str] = {}
        for _ in range(n_keys):
            key = self._name(metadata, "key")
            kinds[key] = self._kind()
            metadata[key], length = self._value()
            if length is not None:
                lengths[key] = length
        keys_end = self._at
        tensors: dict[str, TensorInfo] = {}
        for _ in range(n_tensors):
            name = self._name(tensors, "tensor")
            tensors[name] = self._tensor(name)
        end = max((tensor.offset + tensor.n_bytes for tensor in tensors.values()), default=0)
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment!r}; it must be a power of two")
        begin = -(-self._at // alignment) * alignment
        if (missing := begin + end - len(self._data)) > 0:
            raise ModelLoadError(
                f"{self._file} is cut short: {missing:,} bytes of weights are missing; copy it again"
            )
        tensors = {name: replace(tensor, offset=begin + tensor.offset) for name, tensor in tensors.items()}
        tables = {
            name: np.frombuffer(self._data, "<i8", tensor.n_elements, tensor.offset).copy()
            for name, tensor in tensors.items()
            if tensor.type == I64
        }
        return Header(path, status, metadata, tensors, setting, lengths, kinds, tables, keys_end)

    def _tensor(self, name: str) -> TensorInfo:
        """A tensor's entry; its offset is relative to the start of the data."""
        at, n_dims = self._at, self._integer(_U32)
        if not 1 <= n_dims <= MAX_DIMENSIONS:
            raise ValueError(f"at byte {at:,}: tensor {name} has {n_dims:,} dimensions; 1 to 4 are possible")
        shape = tuple(self._integer(_U64) for _ in range(n_dims))
        ggml_type, offset = self._integer(_U32), self._integer(_U64)
        if not row_bytes(ggml_type, shape[0]):
            raise ModelLoadError(
                f"{self._file}: tensor {name} has type {ggml_type}, unknown to this llama.cpp"
                if shape[0]
                else f"{self._file}: tensor {name} has rows of no values (at byte {at:,})"
            )
        return TensorInfo(name, shape, ggml_type, offset)

    def _kind(self) -> str:
        """The name of the next value's type, without skipping it."""
        before, kind = self._at, self._integer(_U32)
        item = self._integer(_U32) if kind == _ARRAY else None
        self._at = before
        names = [_KINDS[n] if n < len(_KINDS) else str(n) for n in (kind, item) if n is not None]
        return f"[{names[1]}]" if item is not None else names[0]

    def _value(self) -> tuple[Value, int | None]:
        """A value and, for an array, its length."""
        at, kind = self._at, self._integer(_U32)
        if kind == _STRING:
            return self._string(), None
        if kind in _SCALARS:
            return self._scalar(kind), None
        if kind != _ARRAY:
            raise ValueError(f"at byte {at:,}: value type {kind:,} does not exist")
        item = self._integer(_U32)
        if item == _STRING:
            count = self._count(8, "strings in an array")
            self._skip_strings(count)
            return None, count
        if item not in _SCALARS:
            raise ValueError(f"at byte {at:,}: an array of type {item:,}, which does not exist")
        width = struct.calcsize(_SCALARS[item])
        count, start = self._count(width, "numbers in an array"), self._at
        self._skip(count * width, "an array")
        if count > LONGEST_ARRAY:
            return None, count
        return struct.unpack_from(f"<{count}{_SCALARS[item]}", self._data, start), count

    def _skip_strings(self, count: int) -> None:
        at, length = self._at, struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):  # a quarter of a million tokens, and as many merges
                at += 8 + length(self._data, at)[0]
        except (struct.error, OverflowError):
            raise ValueError(f"at byte {self._at:,}: {count:,} strings that end behind the file") from None
        self._skip(at - self._at, "an array")

    def _name(self, known: Mapping[str, object], what: str) -> str:
        """A name that is neither empty nor known: bytes that are not a header rarely look like names."""
        at, name = self._at, self._string()
        if not name or name in known:
            raise ValueError(
                f"at byte {at:,}: " + (f"a second {what} {name}" if name else f"a {what} without a name")
            )
        return name

    def _string(self) -> str:
        at, length = self._at, self._integer(_U64)
        start = self._skip(length, "a string")
        try:
            return self._data[start : self._at].decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"at byte {at:,}: a string that is not UTF-8") from None

    def _count(self, width: int, what: str) -> int:
        """A count of things that each take at least `width` bytes."""
        at, count = self._at, self._integer(_U64)
        if count * width > len(self._data) - self._at:
            raise ValueError(f"at byte {at:,}: {count:,} {what}, in a file of {len(self._data):,} bytes")
        return count

    def _integer(self, kind: int) -> int:
        return int(self._scalar(kind))

    def _scalar(self, kind: int) -> int | float | bool:
        code = "<" + _SCALARS[kind]
        start = self._skip(struct.calcsize(code), "a number")
        (value,) = struct.unpack_from(code, self._data, start)
        return value  # type: ignore[no-any-return]

    def _skip(self, n_bytes: int, what: str) -> int:
        """Skips `n_bytes`; returns where they begin."""
        start, size = self._at, len(self._data)
        if start + n_bytes > size:
            raise ValueError(f"at byte {start:,}: {what} of {n_bytes:,} bytes, in a file of {size:,}")
        self._at = start + n_bytes
        return start
