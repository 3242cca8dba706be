"""The vision tower's plan, errors, file, and the stage that writes it beside the text model."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, quants

from qwen_serve.convert.checkpoint import Checkpoint
from qwen_serve.convert.cli import main
from qwen_serve.convert.errors import CheckpointError
from qwen_serve.convert.safetensors import NUMPY_TYPES, StoredTensor
from qwen_serve.convert.source import Source
from qwen_serve.convert.vision import VisionTower, VisionType, read_preprocessor, write_mmproj
from tests.checkpoints import HIDDEN, PATCH, VISION_HIDDEN, edit_json, vision_config, write_checkpoint

TOWER = "mmproj-Random-1B-F16.gguf"


@pytest.fixture
def seeing(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "Random-1B", vision=True, dtype="F32")


def tower(folder: Path) -> VisionTower:
    preprocessor = read_preprocessor(folder)
    assert preprocessor is not None
    return VisionTower.open(Checkpoint.open(folder), preprocessor)


def run(checkpoint: Path, out: Path, *arguments: str) -> int:
    return main(["--src", str(checkpoint), "--out", str(out), "--quant", "F16", *arguments])


def stored(folder: Path, name: str) -> np.ndarray[Any, Any]:
    tensor = Checkpoint.open(folder).tensors[f"model.visual.{name}"]
    return tensor.read().reshape(tensor.shape)


def test_each_frame_of_the_patches_is_a_tensor_of_its_own(seeing: Path, tmp_path: Path) -> None:
    write_mmproj(tmp_path / "x.gguf", tower(seeing), Source(seeing), "F32")
    found = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "x.gguf").tensors}
    kernels = stored(seeing, "patch_embed.proj.weight")
    for frame, name in enumerate(("v.patch_embd.weight", "v.patch_embd.weight.1")):
        np.testing.assert_array_equal(found[name].data, kernels[:, :, frame])
    np.testing.assert_array_equal(found["mm.2.weight"].data, stored(seeing, "merger.linear_fc2.weight"))


def test_a_row_that_is_no_whole_blocks_stays_f16(seeing: Path, tmp_path: Path) -> None:
    """As in the towers of the 9B and larger, whose FFN is 4,304 wide."""
    write_mmproj(tmp_path / "x.gguf", tower(seeing), Source(seeing), "Q8_0")
    found = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "x.gguf").tensors}
    assert found["v.blk.0.ffn_down.weight"].tensor_type == GGMLQuantizationType.F16
    packed = found["v.blk.1.attn_qkv.weight"]
    assert packed.tensor_type == GGMLQuantizationType.Q8_0
    whole = stored(seeing, "blocks.1.attn.qkv.weight")
    unpacked = quants.dequantize(packed.data, packed.tensor_type)
    assert np.abs(unpacked - whole).max() < np.abs(whole).max() / 200
    assert found["v.position_embd.weight"].tensor_type == GGMLQuantizationType.F32


def test_chunks_of_blocks_are_those_of_the_whole(
    seeing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mmproj(tmp_path / "whole.gguf", tower(seeing), Source(seeing), "Q8_0")
    monkeypatch.setattr("qwen_serve.convert.gguf_file.CHUNK_ELEMENTS", 96)
    write_mmproj(tmp_path / "pieces.gguf", tower(seeing), Source(seeing), "Q8_0")
    assert (tmp_path / "whole.gguf").read_bytes() == (tmp_path / "pieces.gguf").read_bytes()


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (np.nan, "Q8_0", "holds nan, and every weight must be finite"),
        (np.inf, "F32", "holds inf, and every weight must be finite"),
        (1e9, "Q8_0", r"1e\+09 is beyond what Q8_0's scales reach"),
        (1e9, "F16", r"1e\+09 is beyond F16's largest value"),
    ],
)
def test_a_weight_that_does_not_fit_is_named(
    seeing: Path, tmp_path: Path, value: float, kind: VisionType, message: str
) -> None:
    tensor = Checkpoint.open(seeing).tensors["model.visual.blocks.0.attn.qkv.weight"]
    with tensor.path.open("r+b") as file:
        file.seek(tensor.offset + 4 * 100)
        file.write(np.array([value], NUMPY_TYPES["F32"]).tobytes())
    with pytest.raises(CheckpointError, match=rf"blocks\.0\.attn\.qkv\.weight.* {message}"):
        write_mmproj(tmp_path / "x.gguf", tower(seeing), Source(seeing), kind)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "quick_gelu"}, "vision_config.hidden_act is 'quick_gelu'; llama.cpp computes"),
        ({"spatial_merge_size": 4}, "vision_config.spatial_merge_size is 4"),
        ({"temporal_patch_size": 1}, "vision_config.temporal_patch_size is 1"),
        ({"deepstack_visual_indexes": [1]}, "vision_config.deepstack_visual_indexes names layers"),
        ({"num_position_embeddings": 35}, "vision_config.num_position_embeddings (35) must be a square"),
        ({"num_heads": 3}, "vision_config.hidden_size (32) must be a multiple of 4 times num_heads (3)"),
        ({"out_hidden_size": 32}, "vision_config.out_hidden_size is 32, the text model's hidden_size 64"),
        ({"depth": 0}, "vision_config.depth must be a positive integer, got 0"),
        ({"depth": 3}, "tensor model.visual.blocks.2.norm1.weight is missing"),
        ({"depth": 1}, "no rule for tensor model.visual.blocks.1."),
        ({"intermediate_size": 96}, "has shape [80, 32], config.json implies [96, 32]"),
    ],
)
def test_a_tower_that_would_be_computed_otherwise_is_refused(
    seeing: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    message: str,
) -> None:
    edit_json(seeing / "config.json", vision_config=vision_config() | changes)
    assert run(seeing, tmp_path / "out") == 1
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.gguf"))
    assert run(seeing, tmp_path / "out", "--no-vision") == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("image_mean", None), ("image_mean", [0.5, 0.5]), ("image_std", [0.5, 0.5, 0]), ("image_std", "0.5")],
)
def test_a_preparation_that_is_not_said_is_named(seeing: Path, field: str, value: Any) -> None:
    edit_json(seeing / "preprocessor_config.json", **{field: value})
    with pytest.raises(CheckpointError, match=f"preprocessor_config.json: {field} must be 3"):
        tower(seeing)


def test_tensors_without_a_configuration(seeing: Path) -> None:
    edit_json(seeing / "config.json", vision_config=None)
    with pytest.raises(CheckpointError, match=r"config\.json has no vision_config object"):
        tower(seeing)


def test_a_dtype_it_cannot_read_is_named(seeing: Path) -> None:
    opened = tower(seeing)
    name = "model.visual.merger.norm.bias"
    strange: dict[str, StoredTensor] = {
        **opened.checkpoint.tensors,
        name: replace(opened.checkpoint.tensors[name], dtype="F8_E4M3"),
    }
    with pytest.raises(CheckpointError, match=f"{name} is F8_E4M3; known are"):
        replace(opened, checkpoint=replace(opened.checkpoint, tensors=strange)).plan("F16")


# the stage


def test_the_tower_is_written_beside_the_model_and_once(seeing: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(seeing, out) == 0
    assert {path.name for path in out.glob("*.gguf")} == {"Random-1B-F16.gguf", TOWER}
    fields = GGUFReader(out / TOWER).fields
    assert fields["general.type"].contents() == "mmproj"
    assert fields["clip.vision.embedding_length"].contents() == VISION_HIDDEN
    assert fields["clip.vision.projection_dim"].contents() == HIDDEN
    assert fields["clip.vision.image_size"].contents() == 6 * PATCH
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.gguf")}
    assert run(seeing, out) == 0
    assert {path.name: path.stat().st_mtime_ns for path in out.glob("*.gguf")} == before
    edit_json(seeing / "preprocessor_config.json", image_mean=[0.1, 0.2, 0.3])
    assert run(seeing, out) == 0
    after = {path.name: path.stat().st_mtime_ns for path in out.glob("*.gguf")}
    assert {name for name in before if before[name] != after[name]} == {TOWER}


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--mmproj-outtype", "q8_0"], "mmproj-Random-1B-Q8_0.gguf"),
        (["--outtype", "BF16"], "mmproj-Random-1B-BF16.gguf"),
        (["--name", "mine"], "mmproj-mine-F16.gguf"),
    ],
)
def test_its_type_and_name(seeing: Path, tmp_path: Path, flags: list[str], name: str) -> None:
    assert run(seeing, tmp_path / "out", *flags) == 0
    assert (tmp_path / "out" / name).is_file()


def test_no_vision_leaves_it_out(seeing: Path, tmp_path: Path) -> None:
    assert run(seeing, tmp_path / "out", "--no-vision") == 0
    assert {path.name for path in (tmp_path / "out").glob("*.gguf")} == {"Random-1B-F16.gguf"}


def test_a_tower_without_a_preprocessor_is_left_out_aloud(
    seeing: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (seeing / "preprocessor_config.json").unlink()
    assert run(seeing, tmp_path / "out") == 0
    assert {path.name for path in (tmp_path / "out").glob("*.gguf")} == {"Random-1B-F16.gguf"}
    said = re.search(r"has a vision tower, and no (.*) that says", capsys.readouterr().err)
    assert said is not None
    assert said[1] == "preprocessor_config.json or processor_config.json"


def test_what_a_killed_run_left_of_it_is_cleared_away(seeing: Path, tmp_path: Path) -> None:
    left, other = (tmp_path / "out" / f".mmproj-{name}-F16.gguf.x.part" for name in ("Random-1B", "Random"))
    left.mkdir(parents=True)
    other.mkdir()
    assert run(seeing, tmp_path / "out") == 0
    assert (left.exists(), other.exists()) == (False, True)
