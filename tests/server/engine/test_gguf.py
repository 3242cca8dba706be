"""The header reader: what it reads, and what it says of files that are no good."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest

from server.engine import Engine, ModelLoadError
from server.engine.gguf import read_header
from tests.server.engine.helpers import settings

if TYPE_CHECKING:
    from pathlib import Path


def test_it_reads_what_the_gguf_package_reads(nano_q4_k_m: Path) -> None:
    header, expected = read_header(nano_q4_k_m), gguf.GGUFReader(nano_q4_k_m)
    assert dict(header.tensors) == {tensor.name: tensor.n_bytes for tensor in expected.tensors}
    for name, field in expected.fields.items():
        if name.startswith("GGUF."):
            continue
        value = header.metadata[name]
        if value is not None:
            wanted = field.contents()
            assert value == (tuple(wanted) if isinstance(wanted, list) else wanted), name
        else:
            assert field.types == [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING]


def test_every_value_type_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "qwen35")
    writer.add_uint8("a.u8", 200)
    writer.add_int16("a.i16", -300)
    writer.add_uint64("a.u64", 2**40)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_array("a.list", [1, 2, 3])
    writer.add_array("a.words", ["x", "yy"])
    writer.add_string("a.text", "Grüße")
    writer.add_tensor("t", np.zeros((3, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(path)
    values = [
        header.metadata[f"a.{name}"] for name in ("u8", "i16", "u64", "f64", "bool", "list", "words", "text")
    ]
    assert values == [200, -300, 2**40, 0.1, True, (1, 2, 3), None, "Grüße"]
    assert header.tensors == {"t": 3 * 64 * 4}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read|not a whole GGUF"),
        (b"PK\x03\x04 a zip", "not a GGUF file"),
        (b"GGUF\x01\x00\x00\x00" + bytes(16), "version 1"),
        (b"GGUF\x03\x00\x00\x00" + b"\x01" + bytes(7) + b"\x05" + bytes(7), "not a whole GGUF"),
        (b"GGUF\x03\x00\x00\x00" + bytes(8) + b"\x01" + bytes(7) + b"\xff" * 8, "not a whole GGUF"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=message) as caught:
        read_header(path)
    assert "damaged.gguf" in str(caught.value)


def test_a_file_cut_short_says_how_much_is_missing(nano_f16: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    whole = nano_f16.read_bytes()
    path.write_bytes(whole[: len(whole) - 100_000])
    with pytest.raises(ModelLoadError, match=r"cut short: \d+,\d+ bytes"):
        Engine(settings(path))


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        read_header(tmp_path / "nowhere.gguf")
    with pytest.raises(ModelLoadError, match="folder"):
        read_header(tmp_path)


def test_what_llama_cpp_refuses_is_reported_in_its_words(nano_f16: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(nano_f16.read_bytes().replace(b"qwen35", b"qwenXX"))
    with pytest.raises(ModelLoadError, match="qwenXX"):
        Engine(settings(path))
