"""The safetensors reader and writer: round trips, partial reads, and files that are not whole."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from qwen_serve.convert.errors import CheckpointError
from qwen_serve.convert.safetensors import read_header, write_file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    bits = np.arange(5, dtype=np.uint16)
    write_file(path, [("matrix", "F32", matrix), ("bits", "BF16", bits)], {"format": "pt"})
    return path


def test_what_is_written_is_read(file: Path) -> None:
    matrix, bits = read_header(file)
    assert (matrix.name, matrix.dtype, matrix.shape) == ("matrix", "F32", (3, 4))
    np.testing.assert_array_equal(matrix.read(), np.arange(12, dtype=np.float32))
    assert (bits.name, bits.dtype, bits.read().tolist()) == ("bits", "BF16", [0, 1, 2, 3, 4])


def test_a_part_of_a_tensor(file: Path) -> None:
    assert read_header(file)[0].read(5, 3).tolist() == [5, 6, 7]


def test_data_start_is_aligned_as_the_format_asks(file: Path) -> None:
    (length,) = struct.unpack("<Q", file.read_bytes()[:8])
    assert length % 8 == 0


@pytest.mark.parametrize(("cut", "name", "missing"), [(1, "bits", 1), (9, "bits", 9), (30, "matrix", 20)])
def test_a_truncated_tensor_is_named_with_what_is_missing(
    file: Path, cut: int, name: str, missing: int
) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-cut])
    with pytest.raises(CheckpointError, match=rf"truncated: tensor {name} .*\({missing} bytes are missing\)"):
        read_header(file)


def test_a_file_cut_in_its_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(CheckpointError, match="cut short"):
        read_header(file)


def test_an_empty_file(file: Path) -> None:
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="too few"):
        read_header(file)


def test_something_else_entirely(file: Path) -> None:
    file.write_bytes(b"<!DOCTYPE html>" * 10)  # what a failed download often leaves
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_header(file)


def test_a_range_that_contradicts_the_shape(file: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(CheckpointError, match=r"tensor x: F32 of shape \[4\] takes 16 bytes"):
        read_header(file)


def test_a_file_cut_after_it_was_opened(file: Path) -> None:
    tensor = read_header(file)[0]
    file.write_bytes(file.read_bytes()[: tensor.offset + 4])
    with pytest.raises(CheckpointError, match="ended while reading tensor matrix"):
        tensor.read()
