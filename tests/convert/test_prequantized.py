"""FP8, GPTQ and AWQ checkpoints: their weights, and refused variants."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_serve.convert.checkpoint import Checkpoint
from qwen_serve.convert.dequantize import E4M3
from qwen_serve.convert.errors import CheckpointError
from qwen_serve.convert.gguf_file import write_gguf
from qwen_serve.convert.prequantized import check_method, with_weights
from qwen_serve.convert.safetensors import NUMPY_TYPES, StoredTensor, read_header, write_file
from qwen_serve.convert.source import resolve
from qwen_serve.convert.tensors import plan_tensors
from qwen_serve.llamacpp.gguf import read_header as read_gguf
from tests.checkpoints import edit_json
from tests.prequantized import METHODS, Method, compressed, write_prequantized


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
    written = read_gguf(out).tensors["blk.0.ffn_down.weight"]
    values = np.fromfile(out, np.float32, written.n_elements, offset=written.offset)
    expected = weights["model.language_model.layers.0.mlp.down_proj.weight"]
    np.testing.assert_array_equal(values.reshape(expected.shape), expected)


def test_numbers_of_e4m3() -> None:
    assert E4M3[[0x00, 0x01, 0x08, 0x38, 0x7E, 0xB8]].tolist() == [0, 2**-9, 2**-6, 1, 448, -1]
    assert np.isnan(E4M3[[0x7F, 0xFF]]).all()


GPTQ_8 = {"quant_method": "gptq", "bits": 8}


def stored(folder: Path, *tensors: tuple[str, str, Any]) -> dict[str, StoredTensor]:
    """Tensors in a file of their own, by name."""
    write_file(folder / "x.safetensors", tensors, {})
    return {tensor.name: tensor for tensor in read_header(folder / "x.safetensors")}


def values(tensor: StoredTensor) -> Any:
    return tensor.read().reshape(tensor.shape)


def test_blocks_that_end_with_the_matrix(tmp_path: Path) -> None:
    """Experts in one tensor, too; any run of elements reads its own rows alone."""
    codes = np.full((2, 3, 5), 0x38, np.uint8)
    scales = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    parts = stored(tmp_path, ("x", "F8_E4M3", codes), ("x_scale_inv", "F32", scales))
    weight = with_weights(parts, {"quant_method": "fp8", "weight_block_size": [2, 2]})["x"]
    assert values(weight)[0].tolist() == [[0, 0, 1, 1, 2], [0, 0, 1, 1, 2], [3, 3, 4, 4, 5]]
    assert values(weight)[1, 2].tolist() == [9, 9, 10, 10, 11]
    flat = values(weight).reshape(-1)
    for start in range(30):
        for count in range(1, 31 - start):
            assert weight.read(start, count).tolist() == flat[start : start + count].tolist()


@pytest.mark.parametrize(("dtype", "scale"), [("F8_E8M0", [129, 126]), ("F64", [4.0, 0.5])])
def test_scales_of_other_types(tmp_path: Path, dtype: str, scale: list[float]) -> None:
    codes = np.full((2, 32), 0x38, np.uint8)
    kind = np.uint8 if dtype == "F8_E8M0" else np.float64
    parts = stored(tmp_path, ("x", "F8_E4M3", codes), ("x_scale_inv", dtype, np.array([scale], kind).T))
    weight = with_weights(parts, {"quant_method": "fp8"})["x"]
    assert values(weight)[:, 0].tolist() == [4, 0.5]


def test_gptq_of_eight_bits_without_an_order_and_in_its_second_format(tmp_path: Path) -> None:
    # eight inputs, four outputs that are alike
    parts = stored(
        tmp_path,
        ("x.qweight", "I32", np.array([[0x0F050403], [-1]], np.int32).repeat(4, 1)),
        ("x.qzeros", "I32", np.array([[0x02020202], [-1]], np.int32)),
        ("x.scales", "F32", np.array([[0.5], [2]], np.float32).repeat(4, 1)),
    )
    made = [
        values(
            with_weights(parts, {"quant_method": "gptq", "bits": 8, "checkpoint_format": form})["x.weight"]
        )
        for form in ("gptq_v2", "gptq")
    ]
    assert made[0].tolist() == [[0.5, 1, 1.5, 6.5, 0, 0, 0, 0]] * 4
    assert made[1].tolist() == [[0, 0.5, 1, 6, -2, -2, -2, -2]] * 4


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([("x", "F8_E4M3", (4, 4)), ("x_scale", "U8", (4, 1))], "x_scale is U8; it must be BF16 or F16"),
        ([("x", "F8_E4M3", (4, 4))], "has no tensor x_scale_inv"),
        (
            [("x", "I8", (4, 4)), ("x_scale", "F32", (3, 1))],
            r"x_scale has shape \[3, 1\].* want \[\], \[4, 1\]",
        ),
        ([("x", "F32", (4, 4)), ("x_scale", "F32", (4, 1))], "x is F32 and has x_scale"),
        ([("x_packed", "I32", (4, 4)), ("x_scale", "F32", (4, 1))], "has no tensor x_shape"),
    ],
)
def test_parts_of_a_wrong_type_or_shape(
    tmp_path: Path, parts: list[tuple[str, str, tuple[int, ...]]], said: str
) -> None:
    made = [(name, dtype, np.zeros(shape, NUMPY_TYPES[dtype])) for name, dtype, shape in parts]
    with pytest.raises(CheckpointError, match=said):
        with_weights(stored(tmp_path, *made), METHODS["int8"])


@pytest.mark.parametrize(
    ("g_idx", "said"),
    [(np.zeros(8, np.float32), "is F32; it must be I32 or I64"), (np.full(8, 2), "must give")],
)
def test_groups_of_gptq(tmp_path: Path, g_idx: Any, said: str) -> None:
    dtype = "F32" if g_idx.dtype == np.float32 else "I64"
    parts = stored(
        tmp_path,
        ("x.qweight", "I32", np.zeros((1, 8), np.int32)),
        ("x.qzeros", "I32", np.zeros((1, 1), np.int32)),
        ("x.scales", "F16", np.ones((1, 8), np.float16)),
        ("x.g_idx", dtype, g_idx),
    )
    with pytest.raises(CheckpointError, match=said):
        with_weights(parts, METHODS["gptq"])["x.weight"].read()


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (
            {"quant_method": "torchao"},
            "'torchao'; fp8, fbgemm_fp8, compressed-tensors, .* are known",
        ),
        ({"quant_method": "fp8", "weight_block_size": [1]}, r"weight_block_size is \[1\]; want two lengths"),
        ({"quant_method": "modelopt", "quant_algo": "INT4_AWQ"}, "quant_algo is 'INT4_AWQ'; FP8, "),
        (METHODS["w4a16"] | {"format": "marlin-24"}, "format is 'marlin-24'; pack-quantized, "),
        (
            METHODS["w4a16"] | {"sparsity_config": {"format": "sparse-bitmask"}},
            "sparse weights are not known",
        ),
        (METHODS["w4a16"] | {"transform_config": {"config_groups": {"u": {}}}}, "transforms activations"),
        (METHODS["w4a16"] | {"quantization_status": "frozen"}, "quantization_status is 'frozen'"),
        (compressed("pack-quantized", num_bits=3), "num_bits is 3; 2, 4, 8 are known"),
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
