"""A checkpoint in the official layout with made-up weights and a made-up tokenizer, of any size.

What a tensor holds does not matter to the speed of a conversion, so values come from one pool of normally
distributed BF16 numbers, read from a different place for every tensor. The tokenizer has as many tokens and
merges as the official one; its merges are valid, its tokens are made up.
"""

from __future__ import annotations

import json
import struct
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from convert.config import FULL, LINEAR, ModelConfig
from convert.floats import convert
from convert.tensors import expected_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

SHARD_BYTES = 4_000_000_000
POOL_ELEMENTS = 1 << 23
SPREAD = 0.02  # standard deviation of the weights, as models are initialised
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def qwen35_4b() -> dict[str, Any]:
    """`config.json` of a model with the shapes of Qwen3.5-4B, without the vision tower."""
    layers = 32
    text = {
        "model_type": "qwen3_5_text",
        "vocab_size": 248_320,
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "full_attention_interval": 4,
        "layer_types": [FULL if (i + 1) % 4 == 0 else LINEAR for i in range(layers)],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "max_position_embeddings": 262_144,
        "mtp_num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": {"model_type": "qwen3_5"},
        "tie_word_embeddings": True,
    }


def qwen35_35b_a3b() -> dict[str, Any]:
    """`config.json` of a model with the shapes of Qwen3.5-35B-A3B, without the vision tower."""
    config = qwen35_4b()
    layers = 40
    config["architectures"] = ["Qwen3_5MoeForConditionalGeneration"]
    config["model_type"] = config["vision_config"]["model_type"] = "qwen3_5_moe"
    config["tie_word_embeddings"] = False
    text = config["text_config"]
    del text["intermediate_size"]
    text |= {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "num_hidden_layers": layers,
        "num_key_value_heads": 2,
        "layer_types": [FULL if (i + 1) % 4 == 0 else LINEAR for i in range(layers)],
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
    }
    return config


def write_checkpoint(folder: Path, config: Mapping[str, Any], template: Path) -> int:
    """Writes the checkpoint that `config` describes; added tokens and settings come from `template`, a
    checkpoint.

    Returns:
        The bytes of its tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = ModelConfig.from_json(config)
    _write_json(folder / "config.json", config)
    _write_tokenizer(folder, model.vocab_size, template)
    shapes = {
        source: rule.shape(model)
        for source, _, rule in expected_tensors(
            model, "model.language_model.", range(model.n_layers), has_mtp=True
        )
    }
    shards = list(_split(shapes))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        shard = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / shard, {name: shapes[name] for name in names})
        weight_map |= dict.fromkeys(names, shard)
    total = sum(_nbytes(shape) for shape in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)
    return total


def _split(shapes: Mapping[str, Sequence[int]]) -> Iterator[list[str]]:
    names: list[str] = []
    filled = 0
    for name, shape in shapes.items():
        if names and filled + _nbytes(shape) > SHARD_BYTES:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += _nbytes(shape)
    yield names


def _write_shard(path: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + _nbytes(shape)]}
        offset += _nbytes(shape)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pool = _pool()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for start, shape in enumerate(shapes.values()):
            _write_values(file, pool, start * 104_729 % POOL_ELEMENTS, prod(shape))


def _write_values(file: Any, pool: npt.NDArray[np.uint16], start: int, count: int) -> None:
    while count:
        piece = pool[start : start + count]
        file.write(piece.data)
        count -= len(piece)
        start = 0


def _pool() -> npt.NDArray[np.uint16]:
    values = np.random.default_rng(0).standard_normal(POOL_ELEMENTS, dtype=np.float32)
    return convert(values * np.float32(SPREAD), "F32", "BF16")


def _write_tokenizer(folder: Path, vocab_size: int, template: Path) -> None:
    """The template's tokenizer, its own vocabulary replaced by one that fills the embedding up to its last
    rows."""
    tokenizer, settings, generation = (
        json.loads((template / name).read_text(encoding="utf-8")) for name in TOKENIZER_FILES
    )
    added = tokenizer["added_tokens"]
    size = vocab_size - len(added) - vocab_size // 1000  # leaves padding, as the official embedding has it
    alphabet = [token for token in tokenizer["model"]["vocab"] if len(token) == 1]
    vocab = {token: id_ for id_, token in enumerate(alphabet)}
    merges = []
    for left, right in _pairs(alphabet):
        if len(vocab) == size:
            break
        vocab[left + right] = len(vocab)
        merges.append([left, right])
    tokenizer["model"] |= {"vocab": vocab, "merges": merges}
    tokenizer["added_tokens"] = [entry | {"id": size + i} for i, entry in enumerate(added)]
    settings["added_tokens_decoder"] = {
        str(entry["id"]): {key: value for key, value in entry.items() if key != "id"}
        for entry in tokenizer["added_tokens"]
    }
    for name, value in zip(TOKENIZER_FILES, (tokenizer, settings, generation), strict=True):
        _write_json(folder / name, value)


def _pairs(alphabet: Sequence[str]) -> Iterator[tuple[str, str]]:
    """All words of two symbols, then of three; each is a pair of tokens that came before."""
    yield from product(alphabet, repeat=2)
    for first, second, third in product(alphabet, repeat=3):
        yield first + second, third


def _nbytes(shape: Sequence[int]) -> int:
    return 2 * prod(shape)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
