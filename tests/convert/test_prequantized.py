"""FP8, GPTQ and AWQ checkpoints: their weights, and refused variants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_serve.convert.checkpoint import Checkpoint
from qwen_serve.convert.errors import CheckpointError
from qwen_serve.convert.gguf_file import write_gguf
from qwen_serve.convert.prequantized import E4M3, check_method, dequantize_fp8, dequantize_gptq
from qwen_serve.convert.source import resolve
from qwen_serve.convert.tensors import plan_tensors
from qwen_serve.llamacpp.gguf import read_header
from tests.checkpoints import edit_json
from tests.prequantized import METHODS, Method, write_prequantized


@pytest.mark.parametrize("method", METHODS)
def test_weights_are_what_was_quantized(method: Method, tmp_path: Path) -> None:
    """Read whole, in pieces as experts are, and out of the GGUF."""
    weights = write_prequantized(tmp_path / "nano", method)
    checkpoint = Checkpoint.open(tmp_path / "nano")
    assert len(weights) > 20
    for name, weight in weights.items():
        read = checkpoint.tensors[name].read()
        np.testing.assert_array_equal(read.reshape(weight.shape), weight)
        assert checkpoint.tensors[name].read(300, 7).tolist() == weight.reshape(-1)[300:307].tolist()
    kept = tuple(range(checkpoint.config.n_layers))
    out = tmp_path / "nano.gguf"
    plan = plan_tensors(checkpoint, "F32", kept)
    write_gguf(out, checkpoint, resolve(str(tmp_path / "nano")), plan, kept, "F32")
    written = read_header(out).tensors["blk.0.ffn_down.weight"]
    values = np.fromfile(out, np.float32, written.n_elements, offset=written.offset)
    expected = weights["model.language_model.layers.0.mlp.down_proj.weight"]
    np.testing.assert_array_equal(values.reshape(expected.shape), expected)


def test_numbers_of_e4m3() -> None:
    assert E4M3[[0x00, 0x01, 0x08, 0x38, 0x7E, 0xB8]].tolist() == [0, 2**-9, 2**-6, 1, 448, -1]
    assert np.isnan(E4M3[[0x7F, 0xFF]]).all()


def test_blocks_that_end_with_the_matrix() -> None:
    """Experts in one tensor, too."""
    codes = np.full((2, 3, 5), 0x38, np.uint8)
    scales = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    weight = dequantize_fp8(codes, scales, block=(2, 2))
    assert weight[0].tolist() == [[0, 0, 1, 1, 2], [0, 0, 1, 1, 2], [3, 3, 4, 4, 5]]
    assert weight[1, 2].tolist() == [9, 9, 10, 10, 11]


def test_gptq_of_eight_bits_without_an_order_and_in_its_second_format() -> None:
    codes = np.array([[0x0F050403], [-1]], np.int32).repeat(4, 1)  # eight inputs, four outputs that are alike
    zeros = np.array([[0x02020202], [-1]], np.int32)
    scales = np.array([[0.5], [2]], np.float32).repeat(4, 1)
    made = [dequantize_gptq(codes, zeros, scales, bits=8, offset=offset).tolist() for offset in (0, 1)]
    assert made[0] == [[0.5, 1, 1.5, 6.5, 0, 0, 0, 0]] * 4
    assert made[1] == [[0, 0.5, 1, 6, -2, -2, -2, -2]] * 4


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ({"quant_method": "compressed-tensors"}, "'compressed-tensors'; fp8, gptq and awq are known"),
        ({"quant_method": "fp8"}, r"weight_block_size is None; want two lengths, such as \[128, 128\]"),
        ({"quant_method": "gptq", "bits": 3}, "bits is 3; 4 and 8 are known"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'; gptq and gptq_v2"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version is 'gemv'; gemm is known"),
        ({"quant_method": "awq", "bits": 8}, "bits is 8; 4 is known"),
    ],
)
def test_methods_that_are_not_known(method: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        check_method(method)


def test_parts_that_are_missing_or_do_not_fit(tmp_path: Path) -> None:
    write_prequantized(tmp_path / "nano", "fp8")
    other = METHODS["fp8"] | {"weight_block_size": [64, 64]}
    edit_json(tmp_path / "nano" / "config.json", quantization_config=other)
    with pytest.raises(CheckpointError, match=r"_scale_inv has shape .* in blocks of \[64, 64\] want"):
        Checkpoint.open(tmp_path / "nano")
    write_prequantized(tmp_path / "second", "gptq")
    edit_json(tmp_path / "second" / "config.json", quantization_config={**METHODS["gptq"], "bits": 8})
    with pytest.raises(CheckpointError, match=r"qzeros is I32 of .*; with 8 bits and scales of"):
        Checkpoint.open(tmp_path / "second")
