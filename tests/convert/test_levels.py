"""Which level of a config.json decides, heads beside tied embeddings, and keys without effect."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_serve.convert.adapter import Adapter, is_adapter
from qwen_serve.convert.checkpoint import Checkpoint, read_config
from qwen_serve.convert.config import ModelConfig
from qwen_serve.convert.errors import CheckpointError
from qwen_serve.convert.prune_vocab import kept_tokens
from qwen_serve.convert.safetensors import write_file
from qwen_serve.convert.tensors import plan_tensors
from qwen_serve.convert.vocab import Vocab
from tests.checkpoints import edit_json, model_config, set_tied, write_checkpoint

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def planned(folder: Path) -> tuple[Checkpoint, set[str]]:
    checkpoint = Checkpoint.open(folder)
    kept = tuple(range(checkpoint.config.n_layers))
    return checkpoint, {tensor.name for tensor in plan_tensors(checkpoint, "F16", kept).tensors}


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("outer", [True, False, None])
@pytest.mark.parametrize("inner", [True, False, None])
def test_a_head_that_differs_is_kept(
    tmp_path: Path, nested: bool, outer: bool | None, inner: bool | None
) -> None:
    folder = set_tied(write_checkpoint(tmp_path / "x", layers=4, tied=False, nested=nested), outer, inner)
    checkpoint, names = planned(folder)
    assert "output.weight" in names
    said = outer if nested else inner
    assert [remark for remark in checkpoint.config.remarks if "kept as the head" in remark] != [] or not said
    assert not read_config(folder / "config.json").tied_embeddings
    pruned = plan_tensors(
        checkpoint, "F16", (0, 1, 2, 3), kept_tokens(Vocab.load(folder, checkpoint.config), 200)
    )
    rows = {tensor.name: tensor.shape[0] for tensor in pruned.tensors}
    assert rows["output.weight"] == rows["token_embd.weight"] < 320


@pytest.mark.parametrize(
    ("outer", "inner", "tied"),
    [(True, False, True), (True, None, True), (False, True, True), (None, True, True), (False, False, None)],
)
def test_without_a_head_the_outer_key_decides_or_whichever_says_tied(
    tmp_path: Path, outer: bool | None, inner: bool | None, tied: bool | None
) -> None:
    folder = set_tied(write_checkpoint(tmp_path / "x", layers=4), outer, inner)
    if tied is None:
        with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight is missing"):
            planned(folder)
        return
    checkpoint, names = planned(folder)
    assert "output.weight" not in names
    assert any("on one level alone" in remark for remark in checkpoint.config.remarks) == (not outer)


def test_a_copy_of_the_embedding_is_no_head_of_its_own(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "x", layers=4, head_copy=True)
    checkpoint, names = planned(folder)
    assert "output.weight" not in names
    assert checkpoint.config.remarks == ()


def test_only_the_inner_level_shapes_the_text_model() -> None:
    config = model_config() | {"hidden_size": 128, "rms_norm_eps": 1e-5, "rope_scaling": YARN}
    read = ModelConfig.from_json(config)
    assert (read.hidden_size, read.rms_norm_eps, read.rope["rope_type"]) == (64, 1e-6, "default")
    (remark,) = read.remarks
    assert "beside text_config" in remark
    assert all(key in remark for key in ("hidden_size (128)", "rms_norm_eps (1e-05)", "rope_scaling"))


def test_missing_keys_have_the_classes_defaults() -> None:
    config = model_config()
    for key in ("rms_norm_eps", "max_position_embeddings", "linear_conv_kernel_dim"):
        del config["text_config"][key]
    read = ModelConfig.from_json(config | {"rms_norm_eps": 1e-5})
    assert (read.rms_norm_eps, read.max_positions, read.conv_kernel) == (1e-6, 32768, 4)


def test_rope_scaling_replaces_rope_parameters() -> None:
    plain = model_config()["text_config"]["rope_parameters"]
    read = ModelConfig.from_json(model_config(rope_scaling=YARN | {"mrope_section": [2, 1, 1]}))
    assert read.rope == YARN | {"mrope_section": [2, 1, 1], "rope_theta": 10_000.0}
    (remark,) = read.remarks
    assert "rope_scaling replaces rope_parameters" in remark
    assert "rope_theta 10000000, partial_rotary_factor 0.25 (rope_theta is 10000)" in remark
    whole = ModelConfig.from_json(model_config(rope_scaling={**plain, **YARN}))
    assert whole.rope["rope_theta"] == 10_000_000
    assert whole.remarks == ()


def test_yarns_original_length_may_stand_beside() -> None:
    short = {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"}
    rope = model_config()["text_config"]["rope_parameters"] | short
    assert ModelConfig.from_json(model_config(rope_parameters=rope)).rope[
        "original_max_position_embeddings"
    ] == (4096)
    beside = model_config(rope_parameters=rope | YARN, original_max_position_embeddings=512)
    assert ModelConfig.from_json(beside).rope["original_max_position_embeddings"] == 512


@pytest.mark.parametrize(
    "extra",
    [
        {"model_name": "unsloth/Qwen3.5-4B"},
        {"max_window_layers": 24, "use_sliding_window": False},
        {"num_labels": 1},
        {"transformers.js_config": {"dtype": "q4"}},
        {"temperature": 0.6, "top_p": 0.95, "do_sample": True},
        {"attn_implementation": "flash_attention_2"},
        {"keys_to_ignore_at_inference": ["past_key_values"]},
        {"hf_device_map": {"": 0}},
        {"a_key_of_tomorrow": "x"},
    ],
)
@pytest.mark.parametrize("level", ["outer", "inner"])
def test_keys_without_effect_are_named(extra: dict[str, Any], level: str) -> None:
    config = model_config()
    (config if level == "outer" else config["text_config"]).update(extra)
    read = ModelConfig.from_json(config)
    assert read == ModelConfig.from_json(model_config())
    (remark,) = read.remarks
    assert all(key in remark for key, value in extra.items() if value)


def test_two_names_of_one_gate() -> None:
    assert ModelConfig.from_json(model_config(output_gate_type="silu")).remarks == ()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Qwen3NextForCausalLM", "Qwen3-Next: another arrangement"),
        ("Qwen4ExpForConditionalGeneration", "Qwen4-Exp: hyper-connections"),
    ],
)
def test_neighbours_are_refused_by_name(name: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        ModelConfig.from_json(model_config() | {"architectures": [name]})


def test_special_ids_beyond_the_vocabulary(tmp_path: Path) -> None:
    """The class's default of a picture's token in a small model, and a pad token that was never given a
    row."""
    folder = write_checkpoint(tmp_path / "x", layers=4, nested=False)
    edit_json(folder / "config.json", image_token_id=248056, pad_token_id=320)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    late = {**tokenizer["added_tokens"][0], "id": 320, "content": "<|pad|>"}
    edit_json(folder / "tokenizer.json", added_tokens=[*tokenizer["added_tokens"], late])
    edit_json(folder / "tokenizer_config.json", pad_token="<|pad|>")
    checkpoint = Checkpoint.open(folder)
    (remark,) = checkpoint.config.remarks
    assert "pad_token_id is 320, which has no row" in remark
    vocab = Vocab.load(folder, checkpoint.config)
    assert "pad" not in vocab.special_ids
    assert "<|pad|>" not in vocab.tokens
    assert len(vocab.tokens) == 320


def test_an_adapter_of_embedding_and_head_as_peft_saves_it(tmp_path: Path) -> None:
    """It has copies of the model's own weights, which are not trained."""
    base = write_checkpoint(tmp_path / "base", layers=4, tied=False)
    folder = tmp_path / "adapter"
    parts = {
        "model.language_model.embed_tokens.lora_embedding_A": (4, 320),
        "model.language_model.embed_tokens.lora_embedding_B": (64, 4),
        "model.language_model.embed_tokens.base_layer.weight": (320, 64),
        "lm_head.lora_A.weight": (4, 64),
        "lm_head.lora_B.weight": (320, 4),
        "lm_head.base_layer.weight": (320, 64),
    }
    write_parts(folder, parts)
    assert is_adapter(folder)
    adapter = Adapter.open(folder, read_config(base / "config.json"), "F32")
    names = sorted(tensor.name for tensor in adapter.plan.tensors)
    both = ("output.weight", "token_embd.weight")
    assert names == [f"{name}.lora_{part}" for name in both for part in "ab"]


def write_parts(folder: Path, parts: Mapping[str, tuple[int, ...]]) -> None:
    folder.mkdir()
    generator = np.random.default_rng(0)
    tensors = [
        (f"base_model.model.{name}", "F32", generator.standard_normal(shape).astype(np.float32))
        for name, shape in parts.items()
    ]
    write_file(folder / "adapter_model.safetensors", tensors, {"format": "pt"})
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
