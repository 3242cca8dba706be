"""Splits a GGUF into several files, as llama-gguf-split does: `NAME-00001-of-00003.gguf`.

The first part has the metadata, and each part has as many whole tensors as fit. llama.cpp is given the first
part and finds the others by name.
"""

import struct
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.progress import BYTES, Progress, size
from qwen_serve.convert.stages import Output, StageRecord, fingerprint
from qwen_serve.llamacpp.gguf import (
    ALIGNMENT,
    SPLIT_COUNT,
    SPLIT_NUMBER,
    SPLIT_TENSORS,
    Header,
    TensorInfo,
    read_header,
)

MAGIC, VERSION = b"GGUF", 3
COUNTS = 4 + 4 + 8 + 8
"""Bytes before the keys: magic, version, tensors, keys."""
U16, I32 = (2, "<H"), (5, "<i")
"""ggml's number of a value type, and its `struct` format."""
COPY_BYTES = 16 * 2**20


def part_names(path: Path, count: int) -> list[Path]:
    """The files into which `path` is split."""
    return [path.with_name(f"{path.stem}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)]


def plan_parts(tensors: Sequence[TensorInfo], most: int) -> list[list[TensorInfo]]:
    """Distributes tensors in order over the fewest parts of at most `most` bytes of tensors each.

    Raises:
        ConvertError: a tensor is larger than `most`.
    """
    parts: list[list[TensorInfo]] = [[]]
    filled = 0
    for tensor in tensors:
        n_bytes = _padded(tensor.n_bytes)
        if n_bytes > most:
            raise ConvertError(
                f"--split-max-size: {tensor.name} alone has {size(n_bytes)}; tensors stay whole, so parts "
                "have to be as large"
            )
        if filled + n_bytes > most:
            parts.append([])
            filled = 0
        parts[-1].append(tensor)
        filled += n_bytes
    return parts


def split(whole: Output, most: int, record: StageRecord) -> list[Path]:
    """Writes the parts of a file beside it, of at most `most` bytes of weights each, unless they exist.

    Raises:
        ConvertError: a tensor is larger than a part, too little disk, or an unknown file of that name exists.
    """
    header = read_header(whole.path)
    parts = plan_parts(list(header.tensors.values()), most)
    made_from = fingerprint({"whole": whole.fingerprint, "most": most})
    outputs = [Output(path, made_from) for path in part_names(whole.path, len(parts))]
    sizes = [sum(_padded(tensor.n_bytes) for tensor in tensors) for tensors in parts]
    sizes[0] += header.keys_end
    record.check_room(zip(outputs, sizes, strict=True))
    for number, output in enumerate(outputs):
        record.make(output, partial(_write_part, header, number, parts))
    return [output.path for output in outputs]


def _write_part(header: Header, number: int, parts: Sequence[Sequence[TensorInfo]], part: Path) -> None:
    n_bytes = sum(tensor.n_bytes for tensor in parts[number])
    with (
        header.path.open("rb") as file,
        part.open("wb") as out,
        Progress(f"Writing part {number + 1} of {len(parts)}", n_bytes, BYTES) as progress,
    ):
        _write(out, file, header, number, parts, progress)


def _write(
    out: BinaryIO,
    file: BinaryIO,
    header: Header,
    number: int,
    parts: Sequence[Sequence[TensorInfo]],
    progress: Progress,
) -> None:
    tensors = parts[number]
    given = header.metadata.get("general.alignment", ALIGNMENT) if number == 0 else ALIGNMENT
    alignment = given if isinstance(given, int) else ALIGNMENT
    file.seek(COUNTS)
    keys = file.read(header.keys_end - COUNTS) if number == 0 else b""
    n_keys = len(header.metadata) if number == 0 else 0
    keys += _key(SPLIT_NUMBER, number, U16) + _key(SPLIT_COUNT, len(parts), U16)
    keys += _key(SPLIT_TENSORS, len(header.tensors), I32)
    out.write(MAGIC + struct.pack("<IQQ", VERSION, len(tensors), n_keys + 3) + keys)
    offset = 0
    for tensor in tensors:
        name = tensor.name.encode()
        out.write(struct.pack("<Q", len(name)) + name + struct.pack("<I", len(tensor.shape)))
        out.write(struct.pack(f"<{len(tensor.shape)}QIQ", *tensor.shape, tensor.type, offset))
        offset += _padded(tensor.n_bytes, alignment)
    out.write(bytes(_padded(out.tell(), alignment) - out.tell()))
    for tensor in tensors:
        file.seek(tensor.offset)
        left = tensor.n_bytes
        while left:
            block = file.read(min(left, COPY_BYTES))
            if not block:
                raise ConvertError(f"{header.path}: ends before {tensor.name} does; copy it again")
            out.write(block)
            left -= len(block)
            progress.advance(len(block))
        out.write(bytes(_padded(tensor.n_bytes, alignment) - tensor.n_bytes))


def _key(name: str, value: int, kind: tuple[int, str]) -> bytes:
    return (
        struct.pack("<Q", len(name))
        + name.encode()
        + struct.pack("<I", kind[0])
        + struct.pack(kind[1], value)
    )


def _padded(n_bytes: int, alignment: int = ALIGNMENT) -> int:
    return -(-n_bytes // alignment) * alignment
