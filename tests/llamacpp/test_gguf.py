"""The reader of headers, and its errors for invalid files."""

import os
import random
import struct
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from qwen_serve.llamacpp.gguf import TensorInfo, Value, read_header
from qwen_serve.server.engine import Engine, ModelLoadError
from qwen_serve.server.engine.planning.spec import ModelSpec
from tests.server.engine.helpers import settings


def test_it_reads_what_the_gguf_package_reads(nano_q4_k_m: Path) -> None:
    header, expected = read_header(nano_q4_k_m), gguf.GGUFReader(nano_q4_k_m)
    assert [
        (t.name, t.shape, t.type_name, t.n_elements, t.n_bytes, t.offset) for t in header.tensors.values()
    ] == [
        (t.name, tuple(t.shape.tolist()), t.tensor_type.name, t.n_elements, t.n_bytes, int(t.data_offset))
        for t in expected.tensors
    ]
    for name, field in expected.fields.items():
        if name.startswith("GGUF."):
            continue
        value, wanted = header.metadata[name], field.contents()
        assert header.lengths.get(name) == (len(wanted) if isinstance(wanted, list) else None)
        if value is not None:
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
    assert header.tensors == {"t": TensorInfo("t", (64, 3), 0)}
    assert header.tensors["t"].n_bytes == 3 * 64 * 4


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


def header_of(*parts: bytes, n_tensors: int = 0, n_keys: int = 1) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_keys) + b"".join(parts)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


STRINGS, INTEGERS = struct.pack("<II", 9, 8), struct.pack("<II", 9, 4)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            header_of(text("a"), STRINGS, struct.pack("<Q", 2**62)),
            r"at byte 41: 4,611,\S+ strings in an array",
        ),
        (
            header_of(text("a"), INTEGERS, struct.pack("<Q", 2**62)),
            r"at byte 41: 4,611,\S+ numbers in an array",
        ),
        (header_of(n_keys=2**62), r"at byte 16: 4,611,\S+ metadata keys, in a file of 24 bytes"),
        (header_of(n_tensors=2**62), r"at byte 8: 4,611,\S+ tensors, in a file of 24 bytes"),
        (header_of(struct.pack("<Q", 2**62), bytes(8)), r"at byte 32: a string of 4,611,\S+ bytes"),
        (header_of(text("a"), struct.pack("<I", 77), bytes(8)), "at byte 33: value type 77 does not exist"),
        (header_of(text("a"), struct.pack("<IIQ", 9, 9, 0)), "at byte 33: an array of type 9"),
        (header_of(text(""), struct.pack("<IB", 0, 1), bytes(8)), "at byte 24: a key without a name"),
        (header_of(*(2 * [text("a"), struct.pack("<IB", 0, 1)]), n_keys=2), "a second key a"),
        (header_of(struct.pack("<Q", 2), b"\xff\xff", bytes(9)), "at byte 24: a string that is not UTF-8"),
        (
            header_of(text("general.alignment"), struct.pack("<II", 4, 0)),
            "general.alignment is 0; it must be a power of two",
        ),
        (
            header_of(text("t"), struct.pack("<I", 2**31), bytes(40), n_tensors=1, n_keys=0),
            "at byte 33: tensor t has 2,147,483,648 dimensions; 1 to 4 are possible",
        ),
        (
            header_of(text("t"), struct.pack("<IQIQ", 1, 256, 4, 0), bytes(40), n_tensors=1, n_keys=0),
            "tensor t has type 4, unknown",  # one that ggml had once; it would divide by zero
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_whatever_byte_is_flipped_there_is_a_spec_or_an_error(nano_q4_k_m: Path, tmp_path: Path) -> None:
    """No file makes the reader hang, take all memory, or raise another exception."""
    path, whole = tmp_path / "flipped.gguf", bytearray(nano_q4_k_m.read_bytes())
    size = whole.index(b"tokenizer.ggml.tokens")  # then words, in which a flip is nobody's concern
    tensors = whole.index(b"blk.0.attn_gate") - 200
    places = [*range(size + 80), *range(tensors, tensors + 2000)]
    refused, rng = 0, random.Random(3)
    for place in rng.sample(places, 600):
        damaged = whole.copy()
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            ModelSpec.from_header(read_header(path))
        except ModelLoadError as error:
            refused += 1
            assert str(path) in str(error)
    assert refused > 100


@pytest.mark.parametrize("architecture", ["llama", "qwen3", None])
def test_other_architectures_are_refused_before_anything_is_loaded(
    tmp_path: Path, architecture: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qwen_serve.server.engine.planning.contexts.Model", None)
    path = tmp_path / "other.gguf"
    key = [text("general.architecture"), struct.pack("<I", 8), text(architecture)] if architecture else []
    path.write_bytes(header_of(*key, bytes(64), n_keys=len(key) and 1))
    with pytest.raises(ModelLoadError, match=rf"other\.gguf is of architecture {architecture!r}; .*Qwen3\.5"):
        Engine(settings(path))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_count", 2**31, r"block_count \(it is 2147483648\); it must be an integer from 1 to"),
        ("block_count", 2**31 - 1, r"it has 2,147,483,647 layers, 1 of them .*; there are tensors of 9"),
        ("context_length", 2**31, r"context_length \(it is 2147483648\); .* from 1 to 2,147,483,647"),
        ("rope.dimension_count", 0, r"dimension_count \(it is 0\); it must be an integer from 2 to 64"),
        ("rope.dimension_count", 2**32 - 1, r"dimension_count .* from 2 to"),
        ("rope.dimension_count", 15, r"dimension_count \(it is 15\); it must be even"),
        ("rope.dimension_sections", (3, 3, 2**30, 0), r"dimension_sections .* add up to 1 to 8"),
        ("ssm.inner_size", 0, r"ssm\.inner_size \(it is 0\)"),
        ("ssm.inner_size", 255, r"ssm\.inner_size \(it is 255\); it must be 256, time_step_rank x"),
        ("ssm.group_count", 3, r"group_count \(it is 3\); it must be a divisor of ssm.time_step_rank, 4"),
        ("ssm.conv_kernel", 0, r"ssm\.conv_kernel \(it is 0\)"),
        ("attention.head_count", 0, r"head_count \(it is 0\); it must be 1 to"),
        ("attention.head_count_kv", 0, r"head_count_kv \(it is 0\); it must be a divisor of .* 4"),
        ("attention.head_count_kv", 3, r"head_count_kv \(it is 3\); it must be a divisor of .* 4"),
        ("attention.key_length", 0, r"key_length \(it is 0\)"),
        ("expert_count", 2, r"expert_count \(it is 2\)"),
        ("block_count", 8, r"it has 8 layers"),
        ("block_count", -1, r"no usable qwen35\.block_count \(it is -1\)"),
        ("nextn_predict_layers", 9, r"it has 9 layers, 9 of them"),
        ("full_attention_interval", 0, r"full_attention_interval \(it is 0\)"),
        ("attention.head_count_kv", (1, 2), r"attention\.head_count_kv \(it is \(1, 2\)\)"),
        ("attention.head_count_kv", "4", r"attention\.head_count_kv \(it is '4'\)"),
        ("embedding_length", None, r"embedding_length \(it is missing\)"),
    ],
)
def test_metadata_that_make_no_sense_are_named(
    nano_q4_k_m: Path, key: str, value: Value, message: str
) -> None:
    header = read_header(nano_q4_k_m)
    metadata = {k: v for k, v in header.metadata.items() if "recurrent_layers" not in k}
    damaged = replace(header, metadata={**metadata, f"qwen35.{key}": value})
    with pytest.raises(ModelLoadError, match=message):
        ModelSpec.from_header(damaged)


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


@pytest.mark.timeout(20)
@pytest.mark.parametrize("setting", ["model", "draft_model"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, setting: str) -> None:
    path = tmp_path / "pipe.gguf"
    os.mkfifo(path)
    with pytest.raises(ModelLoadError, match=rf"^{setting}: .*pipe\.gguf cannot be read: it is no regular"):
        read_header(path, setting)


def test_what_llama_cpp_refuses_is_reported_in_its_words(nano_f16: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(nano_f16.read_bytes().replace(b"qwen35", b"qwenXX"))
    with pytest.raises(ModelLoadError, match="qwenXX"):
        Engine(settings(path))
