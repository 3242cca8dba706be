"""Block drafters: what is converted, and what is refused."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from convert import cli
from convert.checkpoint import Checkpoint
from convert.draft import DraftCheckpoint
from convert.draft_pipeline import Parameters
from convert.floats import to_f32
from convert.safetensors import read_header, write_file
from tests.checkpoints import edit_json

MODELS = Path(__file__).parents[2] / "models"
NANO, DRAFT = MODELS / "nano", MODELS / "nano-dflash"


def run(*arguments: str | Path) -> int:
    return cli.main([str(argument) for argument in arguments])


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DRAFT, tmp_path / "draft"))


def test_a_copy_has_the_same_fingerprint(draft: Path) -> None:
    for path in draft.iterdir():
        os.utime(path, (1, 1))
    target = Checkpoint.open(NANO)
    copied, given = (DraftCheckpoint.open(folder, target).fingerprint() for folder in (draft, DRAFT))
    assert copied == given


def test_tensors_arrive_and_both_quants_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = ["--src", DRAFT, "--target", NANO, "--quant", "F32,Q4_K_M", "--out", tmp_path]
    assert run(*wanted) == 0
    stored = {tensor.name: tensor for tensor in read_header(DRAFT / "model.safetensors")}
    made = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "nano-dflash-F32.gguf").tensors}
    fc = stored["fc.weight"]
    np.testing.assert_array_equal(made["fc.weight"].data.ravel(), to_f32(fc.read(), fc.dtype))
    assert len(made) == len(stored)
    fields = GGUFReader(tmp_path / "nano-dflash-Q4_K_M.gguf").fields
    assert fields["general.architecture"].contents() == "dflash"
    assert fields["dflash.target_layers"].contents() == [2, 4, 7]
    assert fields["tokenizer.ggml.mask_token_id"].contents() == 3610
    assert "8,389,296 with the target" in capsys.readouterr().out
    made_at = (tmp_path / "nano-dflash-Q4_K_M.gguf").stat().st_mtime_ns
    assert run(*wanted) == 0
    assert (tmp_path / "nano-dflash-Q4_K_M.gguf").stat().st_mtime_ns == made_at, "it was there already"


def test_parameters_are_those_of_both_and_of_the_original() -> None:
    counts = Parameters.of(DraftCheckpoint.open(DRAFT, Checkpoint.open(NANO)))
    assert (counts.drafter, counts.target) == (1_378_688, 7_010_608)
    assert counts.original > counts.target, "the vision tower is in it"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": 512}, "hidden_size is 512, that of .* is 256"),
        ({"vocab_size": 9}, "vocab_size is 9"),
        ({"dflash_config": {"mask_token_id": 3610, "target_layer_ids": [1, 7]}}, "last one's output"),
        (
            {"dflash_config": {"mask_token_id": 4000, "target_layer_ids": [1]}},
            "mask_token_id 4000 has no row",
        ),
        ({"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id must be a token"),
        ({"dflash_config": {"mask_token_id": 1}}, "target_layer_ids must be a list"),
        ({"num_hidden_layers": 2, "layer_types": None}, "no rule for tensor layers.2"),
        ({"num_hidden_layers": 4, "layer_types": None}, "tensor layers.3.* is missing"),
        ({"intermediate_size": 512}, "has shape"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_is_neox_style": False}, "rope_is_neox_style"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel; of the drafters"),
    ],
)
def test_what_does_not_fit_is_named(
    change: dict[str, object], said: str, draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_json(draft / "config.json", **change)
    assert run("--src", draft, "--target", NANO, "--quant", "F16", "--out", tmp_path / "out") == 1
    assert re.search(said, capsys.readouterr().err)


def test_a_drafter_with_a_selector_is_refused(
    draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = [(t.name, t.dtype, t.read().reshape(t.shape)) for t in read_header(draft / "model.safetensors")]
    tensors.append(("candidate_selector.hidden.weight", "F32", np.zeros((2, 2), np.float32)))
    write_file(draft / "model.safetensors", tensors, {})
    assert run("--src", draft, "--target", NANO, "--quant", "F16", "--out", tmp_path / "out") == 1
    assert "DFlash2 or DSpark" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--src", DRAFT], "give --target"),
        (["--src", NANO, "--target", NANO], "--target is for block drafters"),
        (["--src", DRAFT, "--target", NANO, "--keep-vocab", "100"], "--keep-vocab are not for drafters"),
    ],
)
def test_target_belongs_to_drafters(
    arguments: list[str | Path], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments, "--quant", "F16", "--out", tmp_path) == 1
    assert said in capsys.readouterr().err


def test_a_window_and_own_tables_are_kept(draft: Path, tmp_path: Path) -> None:
    edit_json(
        draft / "config.json",
        use_sliding_window=True,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    tensors = [(t.name, t.dtype, t.read().reshape(t.shape)) for t in read_header(draft / "model.safetensors")]
    table = np.zeros((3712, 256), np.uint16)
    tensors += [("embed_tokens.weight", "BF16", table), ("lm_head.weight", "BF16", table)]
    write_file(draft / "model.safetensors", tensors, {})
    assert run("--src", draft, "--target", NANO, "--quant", "F16", "--out", tmp_path / "out") == 0
    reader = GGUFReader(tmp_path / "out" / "draft-F16.gguf")
    assert reader.fields["dflash.attention.sliding_window"].contents() == 64
    assert reader.fields["dflash.attention.sliding_window_pattern"].contents() == [True, False, True]
    assert {"token_embd.weight", "output.weight"} <= {tensor.name for tensor in reader.tensors}
