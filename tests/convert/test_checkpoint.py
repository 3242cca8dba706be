"""Opening checkpoints: errors name the problem, before any weight is read."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from qwen_serve.convert.checkpoint import INDEX, Checkpoint
from qwen_serve.convert.config import FULL, LINEAR, ModelConfig, attention_factor_ratio
from qwen_serve.convert.errors import CheckpointError
from tests.checkpoints import edit_json, model_config, write_checkpoint

FIRST = "model-00001-of-00002.safetensors"


def test_opening_reads_config_and_every_shard(checkpoint: Path) -> None:
    opened = Checkpoint.open(checkpoint)
    assert opened.config.layer_types == (LINEAR, LINEAR, LINEAR, FULL) * 2
    weight_map = json.loads((checkpoint / INDEX).read_text())["weight_map"]
    assert set(opened.tensors) == set(weight_map)


def test_a_missing_shard_is_named(checkpoint: Path) -> None:
    (checkpoint / FIRST).unlink()
    with pytest.raises(CheckpointError, match=f"1 of 2 shards .* missing: {FIRST}"):
        Checkpoint.open(checkpoint)


def test_a_truncated_shard_is_named(checkpoint: Path) -> None:
    shard = checkpoint / FIRST
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"{FIRST}: truncated: tensor model\.\S+ ends at"):
        Checkpoint.open(checkpoint)


def test_a_shard_without_a_promised_tensor(checkpoint: Path) -> None:
    index = json.loads((checkpoint / INDEX).read_text())
    index["weight_map"]["model.extra"] = FIRST
    edit_json(checkpoint / INDEX, **index)
    with pytest.raises(CheckpointError, match=r"model\.extra, promised by"):
        Checkpoint.open(checkpoint)


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        Checkpoint.open(tmp_path)


def test_a_checkpoint_without_weights(checkpoint: Path) -> None:
    for path in (checkpoint / INDEX, *checkpoint.glob("*.safetensors")):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"neither .* nor model\.safetensors"):
        Checkpoint.open(checkpoint)


def test_broken_json_is_named(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not valid JSON"):
        Checkpoint.open(checkpoint)


ROPE = {"rope_type": "default", "rope_theta": 10_000_000}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000_000,
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, got '64'"),
        ({"num_hidden_layers": None}, "num_hidden_layers must be a positive integer"),
        ({"linear_num_value_heads": 3}, r"linear_num_value_heads \(3\) must be a multiple of .* \(2\)"),
        ({"linear_value_head_dim": 64}, r"linear_value_head_dim \(64\) must be linear_key_head_dim \(32\)"),
        ({"linear_key_head_dim": 48, "linear_value_head_dim": 48}, "kernels are for 16, 32, 64, 128"),
        ({"linear_conv_kernel_dim": 7}, "linear_conv_kernel_dim is 7; llama.cpp's kernels are for 3, 4"),
        ({"num_key_value_heads": 3}, r"\(4\) must be a multiple of num_key_value_heads \(3\)"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false'"),
        ({"num_hidden_layers": 512, "layer_types": None}, "num_hidden_layers is 512; .* room for 512"),
        ({"max_position_embeddings": 2**31}, "max_position_embeddings must be at most 2147483647"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number, got nan"),
        ({"rope_parameters": ROPE | {"mrope_section": [0, 0, 0]}}, "mrope_section must be three numbers"),
        ({"rope_parameters": ROPE | {"mrope_section": [4, 0, 0]}}, "without an axis in llama.cpp"),
        ({"rope_parameters": ROPE | {"partial_rotary_factor": 0.3}}, "partial_rotary_factor is 0.3; want"),
        ({"layer_types": [LINEAR]}, r"layer_types must be num_hidden_layers \(8\) names"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a positive number"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_type is 'llama3'; known are default"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta must be a positive number"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            "quant_method is 'hqq'; fp8, fbgemm_fp8, compressed-tensors, modelopt, gptq, awq, auto-round, b",
        ),
        ({"attention_bias": True}, "attention_bias is True; llama.cpp computes Qwen3.5 with False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; llama.cpp computes Qwen3.5 with 'silu'"),
        ({"logit_scale": 0.5}, "logit_scale is 0.5; llama.cpp computes Qwen3.5 without such a factor"),
        ({"use_sliding_window": True}, "use_sliding_window is True; every layer of full attention sees"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config is .*; every layer has the same"),
        ({"rope_parameters": {"full_attention": ROPE}}, "rope_parameters.full_attention is an object"),
        (
            {"rope_parameters": YARN | {"beta_fast": 16}},
            "beta_fast is 16; llama.cpp computes Qwen3.5 with 32",
        ),
        ({"rope_parameters": YARN | {"truncate": False}}, "truncate is False; .* with True"),
        ({"rope_parameters": YARN | {"factor": 0.5}}, "rope_parameters.factor must be at least 1, got 0.5"),
        ({"rope_parameters": YARN | {"attention_factor": "1"}}, "attention_factor must be a positive number"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_json(model_config(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_dropout": 0.1, "initializer_range": 0.02, "torch_dtype": "bfloat16", "use_cache": False},
        {"unsloth_version": "2026.1.1", "unsloth_fixed": True, "_name_or_path": "somewhere"},
        {"sliding_window": None, "use_sliding_window": False, "pruned_heads": {}},
        {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}},
        {"rope_parameters": YARN | {"beta_fast": 32.0, "beta_slow": 1, "extrapolation_factor": 1.0}},
    ],
)
def test_what_changes_nothing_may_stand_there(changes: dict[str, Any]) -> None:
    assert ModelConfig.from_json(model_config(**changes)).n_layers == 8
    assert ModelConfig.from_json(model_config(nested=False, **changes)).n_layers == 8


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({}, 1.0),
        ({"attention_factor": 1.0}, 1 / 1.1386294),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1 / 1.1386294),
        ({"attention_factor": 1.1386294}, 1.0),
    ],
)
def test_yarns_attention_factor_over_what_llama_cpp_infers(extra: dict[str, float], expected: float) -> None:
    config = ModelConfig.from_json(model_config(rope_parameters=YARN | extra))
    assert attention_factor_ratio(config.rope) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM", None])
def test_another_architecture_is_refused(architecture: str | None) -> None:
    config = model_config() | {"architectures": [architecture] if architecture else None, "model_type": "x"}
    with pytest.raises(CheckpointError, match="knows Qwen3_5ForConditionalGeneration"):
        ModelConfig.from_json(config)


def test_layer_types_follow_from_the_interval() -> None:
    config = ModelConfig.from_json(model_config(layer_types=None, full_attention_interval=2))
    assert config.layer_types == (LINEAR, FULL) * 4


def test_a_copy_has_the_same_fingerprint(checkpoint: Path, tmp_path: Path) -> None:
    first = Checkpoint.open(checkpoint).fingerprint()
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy", copy_function=shutil.copyfile))
    for path in copy.iterdir():
        os.utime(path, (1, 1))
    assert Checkpoint.open(copy).fingerprint() == first


def test_the_fingerprint_changes_with_texts_and_weights(checkpoint: Path, tmp_path: Path) -> None:
    first = Checkpoint.open(checkpoint).fingerprint()
    assert Checkpoint.open(checkpoint).fingerprint() == first
    edit_json(checkpoint / "generation_config.json", top_k=21)
    second = Checkpoint.open(checkpoint).fingerprint()
    write_checkpoint(checkpoint, seed=1)
    edit_json(checkpoint / "generation_config.json", top_k=21)
    assert len({first, second, Checkpoint.open(checkpoint).fingerprint()}) == 3
