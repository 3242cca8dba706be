"""The quick reader of a GGUF's tensor table, against gguf's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFReader

from qwen_serve.convert.checkpoint import Checkpoint
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.gguf_file import write_gguf
from qwen_serve.convert.gguf_header import read_head, read_tensors
from qwen_serve.convert.source import Source
from qwen_serve.convert.tensors import plan_tensors


@pytest.fixture
def file(checkpoint: Path, tmp_path: Path) -> Path:
    path, kept = tmp_path / "x.gguf", tuple(range(8))
    opened = Checkpoint.open(checkpoint)
    write_gguf(path, opened, Source(checkpoint), plan_tensors(opened, "BF16", kept), kept, "BF16")
    return path


def test_the_same_table_as_gguf_reads(file: Path) -> None:
    expected = [
        (t.name, tuple(t.shape.tolist()), t.tensor_type, t.n_elements, t.n_bytes, int(t.data_offset))
        for t in GGUFReader(file).tensors
    ]
    found = [(t.name, t.shape, t.type, t.n_elements, t.n_bytes, t.offset) for t in read_tensors(file)]
    assert found == expected


def test_the_same_values_as_gguf_reads(file: Path) -> None:
    """Of arrays their lengths."""
    fields = {name: field.contents() for name, field in GGUFReader(file).fields.items()}
    expected = {
        name: len(value) if isinstance(value, list) else value
        for name, value in fields.items()
        if not name.startswith("GGUF.")  # its own, of the file
    }
    assert read_head(file).values == expected


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"GGML" + data[4:], "starts with b'GGML'"),
        (lambda data: data[:4] + b"\x09" + data[5:], "version 9; known are 2 and 3"),
        (lambda data: data[:3000], "not a whole GGUF file"),
        (lambda data: b"", "not a whole GGUF file"),
    ],
)
def test_damaged_files_are_named(file: Path, damage: object, message: str) -> None:
    assert callable(damage)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ConvertError, match=message):
        read_tensors(file)
