"""A quantized checkpoint's own integers in GGUF types: exact, or rounded again with the reason."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from qwen_serve.convert.checkpoint import INDEX, Checkpoint, read_tensors
from qwen_serve.convert.dequantize import Grid
from qwen_serve.convert.floats import convert, to_f32
from qwen_serve.convert.gguf_file import write_gguf
from qwen_serve.convert.grids import Kept, NotHeld, blocks_of, has_grids
from qwen_serve.convert.quantize import quantize
from qwen_serve.convert.recipes import load_recipe
from qwen_serve.convert.safetensors import write_file
from qwen_serve.convert.source import Source
from qwen_serve.convert.tensors import plan_tensors
from qwen_serve.llamacpp.evaluation import Runtime
from qwen_serve.llamacpp.gguf import read_header
from tests.checkpoints import edit_json, write_checkpoint
from tests.prequantized import METHODS, Method, quantized, write_prequantized

ROWS, COLUMNS = 6, 256


NOTHING = np.zeros((2, 40), np.uint8)


def grid(group: int, bits: int = 4, *, scale: str = "BF16", zero: int | None = None, seed: int = 0) -> Grid:
    """A random one, with the middle as zero point unless `zero` is given."""
    random = np.random.default_rng(seed)
    steps = random.uniform(0.001, 0.02, (ROWS, COLUMNS // group)).astype(np.float32)
    steps = to_f32(convert(steps, "F32", scale), scale).repeat(group, 1)
    zeros = np.full((ROWS, COLUMNS), 2 ** (bits - 1) if zero is None else zero, np.uint8)
    return Grid(random.integers(0, 2**bits, (ROWS, COLUMNS)).astype(np.uint8), zeros, steps, bits)


def weight(one: Grid) -> NDArray[np.float32]:
    values: NDArray[np.float32] = (one.codes.astype(np.int32) - one.zeros).astype(np.float32) * one.scales
    return values


@pytest.mark.parametrize(
    ("one", "kind"),
    [
        (grid(32), "Q4_0"),
        (grid(64), "Q4_0"),
        (grid(128), "Q4_0"),
        (grid(256), "Q4_0"),
        (grid(32, scale="F16"), "Q4_0"),
        (grid(64, 8), "Q8_0"),
        (grid(256, 8, scale="F16"), "Q8_0"),
    ],
)
def test_a_type_holds_the_grid_exactly(one: Grid, kind: str) -> None:
    found, blocks, exact = blocks_of(one)
    assert (found.name, exact) == (kind, True)
    assert (dequantize(blocks, found) == weight(one)).all()


@pytest.mark.parametrize("one", [grid(32, scale="F32"), grid(128, scale="F32")])
def test_integers_are_kept_with_scales_in_f16(one: Grid) -> None:
    found, blocks, exact = blocks_of(one)
    assert not exact
    steps = np.abs(dequantize(blocks, found) - weight(one)) / one.scales
    assert 0 < steps.max() < 1 / 130


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (grid(16), "more than one scale"),
        (Grid(NOTHING, NOTHING, NOTHING.astype(np.float32), 4), "rows of 40"),
        (replace(grid(32), scales=np.full((ROWS, COLUMNS), 1e-7, np.float32)), "out of F16's range"),
        (grid(32, 8, zero=3), "integers beyond 8 bits"),
        (grid(128, zero=4), "zero points"),
    ],
)
def test_other_grids_are_refused_with_the_reason(one: Grid, said: str) -> None:
    with pytest.raises(NotHeld, match=said):
        blocks_of(one)


@pytest.mark.parametrize(
    ("method", "types"),
    [
        ("w4a16", {"Q4_0"}),
        ("w4a16-128", {"Q4_0"}),
        ("w4a16-asym", set()),
        ("w8a16", {"Q8_0"}),
        ("int8", {"Q8_0"}),
        ("w4a16-order", set()),
        ("fp8-channel", set()),
    ],
)
def test_the_file_has_the_checkpoints_integers(
    method: Method, types: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = write_prequantized(tmp_path / "nano", method)
    checkpoint = Checkpoint.open(tmp_path / "nano")
    kept = tuple(range(checkpoint.config.n_layers))
    plan = plan_tensors(checkpoint, "F16", kept)
    base, out = tmp_path / "base.gguf", tmp_path / "out.gguf"
    write_gguf(base, checkpoint, Source(tmp_path / "nano"), plan, kept, "F16")
    recipe = load_recipe("Q8_0" if "8" in method.replace("128", "") else "Q4_K_M")
    exact = Kept.choose(checkpoint, plan, base, recipe, weighted=False)
    assert has_grids(checkpoint) == (method != "fp8-channel")
    assert {kind.name for kind in exact.types.values()} == types if exact else not types
    quantize(base, out, recipe, None, Runtime(threads=1, n_gpu_layers=0), None, exact)
    header, found = read_header(out), Counter[str]()
    for tensor in plan.tensors:
        name = tensor.stored.name.removesuffix("_packed")
        if exact is None or tensor.name not in exact.types:
            continue
        info = header.tensors[tensor.name]
        assert info.type_name == exact.types[tensor.name].name
        data = np.fromfile(out, np.uint8, info.n_bytes, offset=info.offset)
        values = dequantize(data.reshape(*info.shape[:0:-1], -1), GGMLQuantizationType(info.type))
        expected = weights[name]
        if tensor.reorder is not None:
            expected = tensor.reorder(expected, checkpoint.config)
        assert (values == expected).all(), tensor.name
        found[info.type_name] += 1
    assert sum(found.values()) >= (20 if method in ("w4a16", "w8a16", "int8") else len(types) and 1)
    said = capsys.readouterr().err
    assert ("keep the checkpoint's integers" in said) == (method != "fp8-channel")
    assert ("more than one scale" in said) == (method == "w4a16-order")
    assert ("with zero points" in said) == (method == "w4a16-asym")


@pytest.mark.parametrize("level", ["Q2_K", "IQ4_XS"])
def test_a_smaller_recipe_decides(level: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_prequantized(tmp_path / "nano", "w4a16")
    checkpoint = Checkpoint.open(tmp_path / "nano")
    kept = tuple(range(checkpoint.config.n_layers))
    plan = plan_tensors(checkpoint, "F16", kept)
    base = tmp_path / "base.gguf"
    write_gguf(base, checkpoint, Source(tmp_path / "nano"), plan, kept, "F16")
    exact = Kept.choose(checkpoint, plan, base, load_recipe(level), weighted=True)
    assert f"recipe's {level} is smaller" in capsys.readouterr().err
    assert exact is None or all("ffn_gate" not in name for name in exact.types)


def test_experts_of_a_block_keep_their_integers(tmp_path: Path) -> None:
    """They are stored one by one and become one tensor."""
    folder = write_checkpoint(tmp_path / "x", layers=4, experts="per-expert", tied=False)
    parts, weights, random = [], {}, np.random.default_rng(0)
    for name, tensor in read_tensors(folder).items():
        values = tensor.read().reshape(tensor.shape)
        if ".experts." in name:
            made, weights[name] = quantized(name, to_f32(values, tensor.dtype), "w4a16", random)
            parts += made
        else:
            parts.append((name, tensor.dtype, values))
    for path in (folder / INDEX, *folder.glob("*.safetensors")):
        path.unlink()
    write_file(folder / "model.safetensors", parts, {"format": "pt"})
    edit_json(folder / "config.json", quantization_config=METHODS["w4a16"])
    checkpoint = Checkpoint.open(folder)
    plan = plan_tensors(checkpoint, "F16", (0, 1, 2, 3))
    base = tmp_path / "base.gguf"
    write_gguf(base, checkpoint, Source(folder), plan, (0, 1, 2, 3), "F16")
    exact = Kept.choose(checkpoint, plan, base, load_recipe("Q8_0"), weighted=False)
    assert exact is not None
    assert {name for name in exact.types if "_exps" in name} == {
        t.name for t in plan.tensors if "_exps" in t.name
    }
    quantize(base, tmp_path / "q.gguf", load_recipe("Q8_0"), None, Runtime(1, 0), None, exact)
    info = read_header(tmp_path / "q.gguf").tensors["blk.1.ffn_up_exps.weight"]
    data = np.fromfile(tmp_path / "q.gguf", np.uint8, info.n_bytes, offset=info.offset)
    values = dequantize(data.reshape(6, 32, -1), GGMLQuantizationType.Q4_0)
    for expert in range(6):
        name = f"model.language_model.layers.1.mlp.experts.{expert}.up_proj.weight"
        assert (values[expert] == weights[name]).all()
