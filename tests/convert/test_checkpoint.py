"""Opening checkpoints: what is wrong is named, before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from convert.checkpoint import INDEX, Checkpoint
from convert.config import FULL, LINEAR, ModelConfig
from convert.errors import CheckpointError
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
    (checkpoint / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"neither .* nor model\.safetensors"):
        Checkpoint.open(checkpoint)


def test_broken_json_is_named(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not valid JSON"):
        Checkpoint.open(checkpoint)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, got '64'"),
        ({"num_hidden_layers": None}, "num_hidden_layers must be a positive integer"),
        ({"linear_num_value_heads": 3}, r"linear_num_value_heads \(3\) must be a multiple of .* \(2\)"),
        ({"layer_types": [LINEAR]}, r"layer_types must be num_hidden_layers \(8\) names"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a number"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_type is 'llama3'; known are default"),
        ({"rope_parameters": {}}, "rope_theta must be a number"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"already quantized \(fp8\)"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_json(model_config(**changes))


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM", None])
def test_another_architecture_is_refused(architecture: str | None) -> None:
    config = model_config() | {"architectures": [architecture] if architecture else None}
    with pytest.raises(CheckpointError, match="knows Qwen3_5ForConditionalGeneration"):
        ModelConfig.from_json(config)


def test_layer_types_follow_from_the_interval() -> None:
    config = ModelConfig.from_json(model_config(layer_types=None, full_attention_interval=2))
    assert config.layer_types == (LINEAR, FULL) * 4


def test_the_fingerprint_changes_with_texts_and_weights(checkpoint: Path, tmp_path: Path) -> None:
    first = Checkpoint.open(checkpoint).fingerprint()
    assert Checkpoint.open(checkpoint).fingerprint() == first
    edit_json(checkpoint / "generation_config.json", top_k=21)
    second = Checkpoint.open(checkpoint).fingerprint()
    write_checkpoint(checkpoint, seed=1)
    edit_json(checkpoint / "generation_config.json", top_k=21)
    assert len({first, second, Checkpoint.open(checkpoint).fingerprint()}) == 3
