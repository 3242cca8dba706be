"""A lazy reader and a small writer for safetensors files.

Format: 8 bytes of little-endian header length, a JSON header that maps each name to dtype, shape and byte
range, then the data (https://huggingface.co/docs/safetensors, "Format"). Tensors are read with `pread`, not
`mmap`, so memory holds only what is needed, not every page that was read.
"""

import json
import os
import struct
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from qwen_serve.convert.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the safetensors library's limit

# numpy has neither bfloat16 nor types of 8 bits: their bits are handled as uint16 and uint8
NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
}
WEIGHT_TYPES = ("BF16", "F16", "F32", "F64")
TABLE_TYPES = ("I32", "I64")


class TensorSource(Protocol):
    """A source of a tensor's elements: a `StoredTensor`, or any object that can return a run of elements."""

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> Path: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def read(self, start: int, count: int) -> npt.NDArray[Any]: ...


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's place in a file: elements are row-major, `dtype` is a safetensors name such as BF16."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int

    @property
    def n_elements(self) -> int:
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        return NUMPY_TYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        return self.n_elements * self.itemsize

    def read(self, start: int = 0, count: int | None = None) -> npt.NDArray[Any]:
        """Reads `count` elements from `start` on (all of them by default) as a flat array; BF16 comes as
        uint16 bits.

        Raises:
            CheckpointError: the file ends inside the tensor (it was cut after it was opened).
        """
        count = self.n_elements - start if count is None else count
        out = np.empty(count, dtype=NUMPY_TYPES[self.dtype])
        view = out.view(np.uint8).data
        position = self.offset + start * self.itemsize
        fd = os.open(self.path, os.O_RDONLY)
        try:
            while view:
                n = os.preadv(fd, [view], position)
                if n == 0:
                    raise CheckpointError(f"{self.path}: ended while reading tensor {self.name}")
                view, position = view[n:], position + n
        finally:
            os.close(fd)
        return out


@dataclass(frozen=True)
class Piece:
    """`count` elements of a tensor from `start` on, row-major."""

    source: TensorSource
    start: int
    count: int


class Joined:
    """Pieces of other tensors of one dtype, concatenated as one tensor."""

    def __init__(self, name: str, shape: tuple[int, ...], pieces: Sequence[Piece]) -> None:
        first = pieces[0].source
        self.name, self.shape, self.path, self.dtype = name, shape, first.path, first.dtype
        self.pieces = pieces
        self._ends = list(accumulate(piece.count for piece in pieces))

    def read(self, start: int, count: int) -> npt.NDArray[Any]:
        """Elements `start` to `start + count`, flat."""
        parts: list[npt.NDArray[Any]] = []
        end, place = start + count, bisect_right(self._ends, start)
        while start < end:
            piece, stop = self.pieces[place], min(self._ends[place], end)
            offset = piece.start + start - (self._ends[place] - piece.count)
            parts.append(piece.source.read(offset, stop - start))
            start, place = stop, place + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def read_header(path: Path) -> list[StoredTensor]:
    """Lists the tensors of one file in the order of their data, after checking that each is inside the file.

    Raises:
        CheckpointError: not a safetensors file, or cut short, or a range contradicts its shape.
    """
    file_size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise CheckpointError(
                f"{path}: {file_size} bytes are too few for a safetensors file; download it again"
            )
        (length,) = struct.unpack("<Q", prefix)
        if length > MAX_HEADER_BYTES or 8 + length > file_size:
            raise CheckpointError(
                f"{path}: the header says {length:,} bytes, the file has {file_size:,}: "
                "not a safetensors file, or cut short; download it again"
            )
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise CheckpointError(f"{path}: the safetensors header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the safetensors header is not a JSON object")
    header.pop("__metadata__", None)
    data_start = 8 + length
    tensors = [_entry(path, name, value, data_start, file_size) for name, value in header.items()]
    return sorted(tensors, key=lambda t: t.offset)


def _entry(path: Path, name: str, value: Any, data_start: int, file_size: int) -> StoredTensor:
    try:
        dtype, shape = str(value["dtype"]), tuple(int(n) for n in value["shape"])
        begin, end = (int(n) for n in value["data_offsets"])
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(
            f"{path}: tensor {name} has no dtype, shape and data_offsets in the header"
        ) from None
    if data_start + end > file_size:
        raise CheckpointError(
            f"{path}: truncated: tensor {name} ends at byte {data_start + end:,}, the file at {file_size:,} "
            f"({data_start + end - file_size:,} bytes are missing); download it again"
        )
    tensor = StoredTensor(name, dtype, shape, path, data_start + begin)
    if dtype in NUMPY_TYPES and tensor.nbytes != end - begin:
        raise CheckpointError(
            f"{path}: tensor {name}: {dtype} of shape {list(shape)} takes {tensor.nbytes:,} bytes, "
            f"data_offsets give {end - begin:,}"
        )
    return tensor


def write_file(
    path: Path, tensors: Iterable[tuple[str, str, npt.NDArray[Any]]], metadata: Mapping[str, str]
) -> None:
    """Writes (name, dtype, array) triples to one file; BF16 arrays are uint16 bit patterns."""
    items = list(tensors)
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, dtype, array in items:
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, dtype, array in items:
            file.write(np.ascontiguousarray(array, dtype=NUMPY_TYPES[dtype]).data)
