"""Wrong GGUFs: each key in other types, each tensor in types that are no weights', damaged values."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9
ALIGNMENT = 32
I16, I32 = 25, 26
OTHERS = {
    "i32": (5, struct.pack("<i", -1)),
    "f32": (6, struct.pack("<f", 1.0)),
    "bool": (7, b"\x01"),
    "text": (STRING, struct.pack("<Q", 3) + b"abc"),
    "texts": (ARRAY, struct.pack("<IQQ", STRING, 1, 1) + b"a"),
    "floats": (ARRAY, struct.pack("<IQf", 6, 1, 0.5)),
}
"""Values that a key gets in place of its own."""


@dataclass(frozen=True)
class Key:
    name: str
    kind: int
    data: bytes


@dataclass(frozen=True)
class Entry:
    """A tensor: `shape` has the row's length first, `type` is ggml's number."""

    name: str
    shape: tuple[int, ...]
    type: int
    data: bytes


@dataclass(frozen=True)
class File:
    keys: tuple[Key, ...]
    tensors: tuple[Entry, ...]

    def write(self, path: Path) -> Path:
        head = b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.keys))
        for key in self.keys:
            head += _text(key.name) + struct.pack("<I", key.kind) + key.data
        offset, body = 0, b""
        for tensor in self.tensors:
            head += _text(tensor.name) + struct.pack("<I", len(tensor.shape))
            head += struct.pack(f"<{len(tensor.shape)}QIQ", *tensor.shape, tensor.type, offset)
            body += tensor.data + bytes(-len(tensor.data) % ALIGNMENT)
            offset = len(body)
        path.write_bytes(head + bytes(-len(head) % ALIGNMENT) + body)
        return path

    def with_key(self, name: str, value: tuple[int, bytes] | None) -> File:
        keys = tuple(
            Key(name, *value) if value is not None and key.name == name else key
            for key in self.keys
            if value is not None or key.name != name
        )
        return replace(self, keys=keys)

    def with_tensor(self, name: str, tensor: Entry | None) -> File:
        kept = (tensor if one.name == name else one for one in self.tensors)
        return replace(self, tensors=tuple(one for one in kept if one is not None))


def read(path: Path) -> File:
    """A file's keys and tensors as bytes."""
    data = path.read_bytes()
    n_tensors, n_keys = struct.unpack_from("<QQ", data, 8)
    at, keys, heads = 24, [], []
    for _ in range(n_keys):
        name, at = _read_text(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        end = _end(data, at + 4, kind)
        keys.append(Key(name, kind, data[at + 4 : end]))
        at = end
    for _ in range(n_tensors):
        name, at = _read_text(data, at)
        (rank,) = struct.unpack_from("<I", data, at)
        *shape, kind, offset = struct.unpack_from(f"<{rank}QIQ", data, at + 4)
        heads.append((name, tuple(shape), kind, offset))
        at += 4 + 8 * rank + 12
    begin = -(-at // ALIGNMENT) * ALIGNMENT
    ends = [*sorted(offset for *_, offset in heads)[1:], len(data) - begin]
    after = dict(zip(sorted(offset for *_, offset in heads), ends, strict=True))
    tensors = [Entry(n, s, k, data[begin + o : begin + after[o]]) for n, s, k, o in heads]
    return File(tuple(keys), tuple(tensors))


def mutations(file: File) -> Iterator[tuple[str, File]]:
    """What is wrong, and the file."""
    for key in file.keys:
        for what, value in OTHERS.items():
            if value[0] != key.kind or key.kind == ARRAY:
                yield f"{key.name} as {what}", file.with_key(key.name, value)
        yield f"without {key.name}", file.with_key(key.name, None)
        if key.kind in (4, 5) and struct.unpack("<I", key.data)[0]:
            for number in (0, 1, struct.unpack("<I", key.data)[0] - 1, 2**31 - 1, 2**32 - 1):
                if (data := struct.pack("<I", number)) != key.data:
                    yield f"{key.name} {number}", file.with_key(key.name, (key.kind, data))
    for tensor in file.tensors:
        for name, kind in (("I32", I32), ("I16", I16)):
            size = 4 if kind == I32 else 2
            n = 1
            for length in tensor.shape:
                n *= length
            yield (
                f"{tensor.name} {name}",
                file.with_tensor(
                    tensor.name,
                    replace(tensor, type=kind, data=tensor.data[: n * size].ljust(n * size, b"\0")),
                ),
            )
        yield f"without {tensor.name}", file.with_tensor(tensor.name, None)
        if tensor.type in (0, 1):
            nan = b"\xff\xff\xff\xff" if tensor.type == 0 else b"\xff\x7f"
            yield (
                f"NaN in {tensor.name}",
                file.with_tensor(tensor.name, replace(tensor, data=nan + tensor.data[len(nan) :])),
            )
        if tensor.shape[-1] > 1:
            short = (*tensor.shape[:-1], tensor.shape[-1] - 1)
            yield f"{tensor.name} {short}", file.with_tensor(tensor.name, replace(tensor, shape=short))


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _read_text(data: bytes, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, at)
    return data[at + 8 : at + 8 + length].decode(), at + 8 + length


def _end(data: bytes, at: int, kind: int) -> int:
    if kind == STRING:
        return int(at + 8 + struct.unpack_from("<Q", data, at)[0])
    if kind != ARRAY:
        return at + SIZES[kind]
    item, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if item != STRING:
        return int(at + SIZES[item] * count)
    for _ in range(count):
        at += 8 + struct.unpack_from("<Q", data, at)[0]
    return at
