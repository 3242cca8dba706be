"""Block drafters: supported and refused checkpoints."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from qwen_serve.convert import cli
from qwen_serve.convert.checkpoint import Checkpoint
from qwen_serve.convert.draft import DraftCheckpoint
from qwen_serve.convert.draft_pipeline import Parameters
from qwen_serve.convert.floats import to_f32
from qwen_serve.convert.safetensors import read_header, write_file
from tests.checkpoints import edit_json
from tests.drafters import DRAFT, NANO, some_tokens, with_own_vocabulary


def run(*arguments: str | Path) -> int:
    return cli.main([str(argument) for argument in arguments])


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DRAFT, tmp_path / "draft"))


def test_tensors_arrive_and_both_quants_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted: list[str | Path] = ["--src", DRAFT, "--target", NANO, "--quant", "F32,Q4_K_M", "--out", tmp_path]
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
        (
            {"architectures": ["DFlash2DraftModel"]},
            "DFlash2DraftModel: its candidate selector .*drafters",
        ),
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
        (["--src", DRAFT, "--target", NANO, "--method", "compensated"], "--method, --distill and"),
    ],
)
def test_target_belongs_to_drafters(
    arguments: list[str | Path], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments, "--quant", "Q8_0", "--out", tmp_path) == 1
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


@pytest.mark.parametrize("speculators", [False, True])
def test_a_reduced_vocabulary_arrives_from_both_layouts(speculators: bool, tmp_path: Path) -> None:
    tokens = some_tokens(0.5)
    folder = with_own_vocabulary(tmp_path / "draft", tokens, speculators=speculators)
    out = tmp_path / "out"
    assert run("--src", folder, "--target", NANO, "--quant", "F32,Q4_K_M", "--out", out) == 0
    for quant in ("F32", "Q4_K_M"):
        reader = GGUFReader(out / f"draft-{quant}.gguf")
        made = {tensor.name: tensor for tensor in reader.tensors}
        np.testing.assert_array_equal(made["d2t"].data, tokens)
        assert made["d2t"].tensor_type.name == "I64"
        assert made["output.weight"].shape.tolist() == [256, len(tokens)]
        assert reader.fields["dflash.target_layers"].contents() == [2, 4, 7]
        assert reader.fields["tokenizer.ggml.mask_token_id"].contents() == 3610
        assert "dflash.attention.causal" not in reader.fields


def test_sliding_layers_of_the_speculators_library_are_causal(tmp_path: Path) -> None:
    sliding: dict[str, Any] = {
        "layer_types": ["sliding_attention"] * 3,
        "use_sliding_window": True,
        "sliding_window": 64,
    }
    folder = with_own_vocabulary(tmp_path / "draft", some_tokens(0.1), speculators=True, **sliding)
    config = DraftCheckpoint.open(folder, Checkpoint.open(NANO)).config
    assert (config.causal, config.sliding_window, config.windowed_layers) == (True, 64, (True,) * 3)
    edit_json(folder / "config.json", sliding_window_non_causal=True)
    assert DraftCheckpoint.open(folder, Checkpoint.open(NANO)).config.causal is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids must be a list"),
        ({"aux_hidden_state_layer_ids": [0, 2]}, "aux_hidden_state_layer_ids must be a list"),
        ({"projector_type": "domino"}, "projector_type is 'domino'"),
        ({"speculators_model_type": "dspark"}, "speculators_model_type is 'dspark'"),
        ({"sample_from_anchor": True}, "sample_from_anchor is true"),
        ({"mask_token_id": None}, "mask_token_id must be a token"),
        ({"draft_vocab_size": 4000}, r"draft_vocab_size \(4000\) is above vocab_size \(3712\)"),
        ({"draft_vocab_size": 5}, "has shape"),
    ],
)
def test_what_the_speculators_library_says_is_heeded(
    change: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = with_own_vocabulary(tmp_path / "draft", some_tokens(0.1), speculators=True)
    edit_json(folder / "config.json", **change)
    assert run("--src", folder, "--target", NANO, "--quant", "F16", "--out", tmp_path / "out") == 1
    assert re.search(said, capsys.readouterr().err)


def test_some_layers_causal_and_others_not_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    folder = with_own_vocabulary(tmp_path / "draft", some_tokens(0.1), speculators=True, layer_types=kinds)
    assert run("--src", folder, "--target", NANO, "--quant", "F16", "--out", tmp_path / "out") == 1
    assert "causally, or none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (None, "there is no tensor d2t"),
        (("I64", np.zeros(370, np.int64)), r"shape \[370\]; want .* of shape \[371\]"),
        (("F32", np.zeros(371, np.float32)), "is F32"),
        (("I64", np.full(371, 3700)), "leads to tokens 3700 to 4070, of 3712"),
        (("I64", np.arange(371)[::-1] // 2), "the same token twice"),
    ],
)
def test_a_table_that_leads_nowhere_is_refused(
    table: tuple[str, np.ndarray] | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = with_own_vocabulary(tmp_path / "draft", some_tokens(0.1))
    shard = folder / "model.safetensors"
    tensors = [(t.name, t.dtype, t.read().reshape(t.shape)) for t in read_header(shard) if t.name != "d2t"]
    write_file(shard, tensors + ([("d2t", *table)] if table else []), {})
    assert run("--src", folder, "--target", NANO, "--quant", "F16", "--out", tmp_path / "out") == 1
    assert re.search(said, capsys.readouterr().err)


def test_a_reduced_vocabulary_needs_a_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = with_own_vocabulary(tmp_path / "draft", some_tokens(0.1))
    shard = folder / "model.safetensors"
    tensors = [(t.name, t.dtype, t.read().reshape(t.shape)) for t in read_header(shard)]
    write_file(shard, [tensor for tensor in tensors if tensor[0] != "lm_head.weight"], {})
    assert run("--src", folder, "--target", NANO, "--quant", "F16", "--out", tmp_path / "out") == 1
    assert "tensor lm_head.weight is missing" in capsys.readouterr().err
