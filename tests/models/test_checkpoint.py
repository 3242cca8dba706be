"""The bundled checkpoint: official layout, row lengths for every quantization, small enough to bundle."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

NANO = Path(__file__).parents[2] / "models" / "nano"
LIMIT = 16_000_000


def read(name: str) -> Any:
    return json.loads((NANO / name).read_text(encoding="utf-8"))


def header(shard: Path) -> dict[str, Any]:
    """The tensors of a safetensors file: name to dtype, shape and data_offsets."""
    with shard.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return {k: v for k, v in json.loads(file.read(length)).items() if k != "__metadata__"}


@pytest.fixture(scope="module")
def tensors() -> dict[str, Any]:
    return {name: info for shard in NANO.glob("*.safetensors") for name, info in header(shard).items()}


def test_the_shards_are_two_and_hold_what_the_index_says(tensors: dict[str, Any]) -> None:
    index = read("model.safetensors.index.json")
    where = index["weight_map"]
    assert len(set(where.values())) == 2
    for file in set(where.values()):
        assert set(header(NANO / file)) == {name for name, shard in where.items() if shard == file}
    size = sum(info["data_offsets"][1] - info["data_offsets"][0] for info in tensors.values())
    assert index["metadata"]["total_size"] == size


def test_the_weights_are_small_and_bf16(tensors: dict[str, Any]) -> None:
    assert sum(shard.stat().st_size for shard in NANO.glob("*.safetensors")) <= LIMIT
    kept_wide = (".A_log", ".linear_attn.norm.weight")
    for name, info in tensors.items():
        assert info["dtype"] == ("F32" if name.endswith(kept_wide) else "BF16"), name


def test_trunk_draft_head_and_vision_tower_are_there(tensors: dict[str, Any]) -> None:
    config = read("config.json")
    text = config["text_config"]
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert len(text["layer_types"]) == text["num_hidden_layers"]
    for i, kind in enumerate(text["layer_types"]):
        assert kind == ("linear_attention" if (i + 1) % text["full_attention_interval"] else "full_attention")
        mixer = "linear_attn.in_proj_qkv" if kind == "linear_attention" else "self_attn.q_proj"
        assert f"model.language_model.layers.{i}.{mixer}.weight" in tensors
    assert text["mtp_num_hidden_layers"] == 1
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"} <= set(tensors)
    assert any(name.startswith("model.visual.") for name in tensors)
    assert "lm_head.weight" not in tensors, "the embeddings are tied"
    assert text["linear_num_key_heads"] != text["linear_num_value_heads"]
    assert text["max_position_embeddings"] >= 16_384


def test_every_k_quant_applies_to_every_large_row(tensors: dict[str, Any]) -> None:
    rows = {
        name: info["shape"]
        for name, info in tensors.items()
        if len(info["shape"]) == 2 and not name.startswith("model.visual.")
    }
    assert rows
    for name, shape in rows.items():
        assert shape[1] % 256 == 0, name


def test_the_vocabulary_has_room_above_the_tokenizer() -> None:
    tokenizer = read("tokenizer.json")
    ids = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])]
    assert sorted(ids) == list(range(len(ids)))
    assert read("config.json")["text_config"]["vocab_size"] > len(ids)
    assert set(tokenizer["model"]["vocab"]) == set(read("vocab.json"))


def test_special_tokens_agree_in_all_files() -> None:
    added = {token["content"]: token for token in read("tokenizer.json")["added_tokens"]}
    listed = read("tokenizer_config.json")["added_tokens_decoder"]
    assert {token["content"]: int(i) for i, token in listed.items()} == {t: v["id"] for t, v in added.items()}
    assert {t["content"] for t in listed.values() if t["special"]} == {
        t for t, v in added.items() if v["special"]
    }
    assert not added["<think>"]["special"] and added["<|im_end|>"]["special"]
    assert added["<|im_end|>"]["id"] in read("generation_config.json")["eos_token_id"]
    assert read("config.json")["image_token_id"] == added["<|image_pad|>"]["id"]


def test_the_chat_template_is_the_servers_own() -> None:
    ours = NANO.parents[1] / "chat_templates" / "qwen3_5.jinja"
    assert (NANO / "chat_template.jinja").read_bytes() == ours.read_bytes()


@pytest.mark.parametrize(
    "text",
    [
        "What is 17+25?",
        "The quick brown fox jumps over the lazy dog. ",
        "先想清楚，再动手去做。 नमस्ते 🚀\n\n\tdef f(x):\r\n    return x**2\n",
        "<think>\n\n</think>\n\n<|im_end|>",
    ],
)
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(NANO / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
