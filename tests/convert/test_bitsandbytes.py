"""bitsandbytes' four and eight bits, written here by their definition, read as the weights they stand for."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qwen_serve.convert.checkpoint import INDEX, Checkpoint, read_tensors
from qwen_serve.convert.errors import CheckpointError
from qwen_serve.convert.floats import to_f32
from qwen_serve.convert.prequantized import check_method
from qwen_serve.convert.safetensors import write_file
from qwen_serve.convert.tensors import plan_tensors
from tests.checkpoints import edit_json, write_checkpoint

TABLE = np.linspace(-1, 1, 16).astype(np.float32)
OUTER = np.linspace(-1, 1, 256).astype(np.float32)
BLOCK, INNER = 64, 256
METHOD = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
Parts = list[tuple[str, str, NDArray[Any]]]


def nearest(values: NDArray[np.float32], table: NDArray[np.float32]) -> NDArray[np.uint8]:
    return np.abs(values[..., None] - table).argmin(-1).astype(np.uint8)


def four_bits(name: str, matrix: NDArray[np.float32], double: bool) -> tuple[Parts, NDArray[np.float32]]:
    """(tensors of the quantized weight, the weight that they stand for)."""
    blocks = matrix.reshape(-1, BLOCK)
    factors = np.abs(blocks).max(1)
    codes = nearest(blocks / factors[:, None], TABLE).reshape(-1)
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": BLOCK,
        "shape": matrix.shape,
        "dtype": "bfloat16",
    }
    stored: Parts = [(f"{name}.absmax", "F32", factors)]
    if double:
        offset = np.float32(factors.mean())
        padded = np.pad(factors - offset, (0, -len(factors) % INNER)).reshape(-1, INNER)
        outer = np.abs(padded).max(1)
        inner = nearest(padded / outer[:, None], OUTER)
        factors = (OUTER[inner] * outer[:, None]).reshape(-1)[: len(factors)] + offset
        state |= {"nested_blocksize": INNER, "nested_offset": float(offset), "nested_dtype": "float32"}
        stored = [
            (f"{name}.absmax", "U8", inner.reshape(-1)[: len(factors)].copy()),
            (f"{name}.nested_absmax", "F32", outer),
            (f"{name}.nested_quant_map", "F32", OUTER),
        ]
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    stored += [
        (name, "U8", (codes[::2] << 4 | codes[1::2]).reshape(-1, 1)),
        (f"{name}.quant_map", "F32", TABLE),
        (f"{name}.quant_state.bitsandbytes__nf4", "U8", text),
    ]
    return stored, (TABLE[codes].reshape(-1, BLOCK) * factors[:, None]).reshape(matrix.shape)


def eight_bits(name: str, matrix: NDArray[np.float32]) -> tuple[Parts, NDArray[np.float32]]:
    largest = np.abs(matrix).max(1)
    codes = np.rint(matrix * (127 / largest[:, None])).astype(np.int8)
    stem = name.removesuffix(".weight")
    stored: Parts = [
        (name, "I8", codes),
        (f"{stem}.SCB", "F32", largest),
        (f"{stem}.weight_format", "U8", np.zeros((), np.uint8)),
    ]
    return stored, codes * (largest / np.float32(127))[:, None]


def quantized(folder: Path, kind: str) -> dict[str, NDArray[np.float32]]:
    """The projections of the MLPs, by name, as they were quantized."""
    parts: Parts = []
    weights = {}
    for name, tensor in read_tensors(folder).items():
        values = tensor.read().reshape(tensor.shape)
        if ".mlp." not in name:
            parts.append((name, tensor.dtype, values))
            continue
        matrix = to_f32(values, tensor.dtype)
        made = eight_bits(name, matrix) if kind == "8" else four_bits(name, matrix, kind == "double")
        parts += made[0]
        weights[name] = made[1]
    for path in (folder / INDEX, *folder.glob("*.safetensors")):
        path.unlink()
    write_file(folder / "model.safetensors", parts, {"format": "pt"})
    edit_json(folder / "config.json", quantization_config=METHOD)
    return weights


@pytest.mark.parametrize("kind", ["single", "double", "8"])
def test_weights_are_what_was_quantized(tmp_path: Path, kind: str) -> None:
    folder = write_checkpoint(tmp_path / "x", layers=4)
    weights = quantized(folder, kind)
    checkpoint = Checkpoint.open(folder)
    assert plan_tensors(checkpoint, "F16", (0, 1, 2, 3))
    assert len(weights) == 15  # of four layers and the MTP block
    for name, weight in weights.items():
        read = checkpoint.tensors[name]
        np.testing.assert_allclose(read.read().reshape(weight.shape), weight, rtol=1e-6)
        np.testing.assert_allclose(read.read(290, 77), weight.reshape(-1)[290:367], rtol=1e-6)


def test_weights_that_were_merged_again_are_read_as_they_are(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "x", layers=4)
    before = {name: tensor.read() for name, tensor in Checkpoint.open(folder).tensors.items()}
    edit_json(folder / "config.json", quantization_config=METHOD)
    after = {name: tensor.read() for name, tensor in Checkpoint.open(folder).tensors.items()}
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (".absmax", r"has no tensor .*\.absmax"),
        (".quant_map", r"has no tensor .*\.quant_map"),
        (".nested_quant_map", r"has no tensor .*\.nested_quant_map"),
    ],
)
def test_missing_parts_are_named(tmp_path: Path, end: str, said: str) -> None:
    folder = write_checkpoint(tmp_path / "x", layers=4)
    quantized(folder, "double")
    parts = [
        (n, t.dtype, t.read().reshape(t.shape))
        for n, t in read_tensors(folder).items()
        if not n.endswith(f"weight{end}")
    ]
    write_file(folder / "model.safetensors", parts, {"format": "pt"})
    with pytest.raises(CheckpointError, match=said):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "change", ["not JSON", '{"shape": [96, 64]}', '{"shape": [96, 64], "blocksize": 128}']
)
def test_states_that_do_not_fit_are_named(tmp_path: Path, change: str) -> None:
    folder = write_checkpoint(tmp_path / "x", layers=4)
    quantized(folder, "single")
    parts = []
    for name, tensor in read_tensors(folder).items():
        values = tensor.read().reshape(tensor.shape)
        state = np.frombuffer(change.encode(), np.uint8)
        parts.append((name, tensor.dtype, state if "quant_state" in name else values))
    write_file(folder / "model.safetensors", parts, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"no JSON with shape and blocksize|in blocks of 128 want"):
        Checkpoint.open(folder)


def test_the_method_is_known() -> None:
    check_method(METHOD)
