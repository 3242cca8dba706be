"""A whole conversion, read back with gguf's reader and by llama.cpp."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, ReaderTensor

from qwen_serve.convert import gguf_file
from qwen_serve.convert.checkpoint import Checkpoint
from qwen_serve.convert.errors import CheckpointError
from qwen_serve.convert.floats import convert, to_f32
from qwen_serve.convert.gguf_file import write_gguf
from qwen_serve.convert.prune import kept_layers
from qwen_serve.convert.safetensors import read_header, write_file
from qwen_serve.convert.source import Source
from qwen_serve.convert.tensors import FloatType, plan_tensors
from tests.checkpoints import HIDDEN, VALUE_HEADS, VOCAB, edit_json, write_checkpoint


def convert_to(
    out: Path, source: Source, outtype: FloatType = "F16", dropped: tuple[int, ...] = ()
) -> dict[str, ReaderTensor]:
    checkpoint = Checkpoint.open(source.path)
    kept = kept_layers(checkpoint.config, dropped)
    write_gguf(out, checkpoint, source, plan_tensors(checkpoint, outtype, kept), kept, outtype)
    return {tensor.name: tensor for tensor in GGUFReader(out).tensors}


def keys(path: Path) -> dict[str, Any]:
    return {key: field.contents() for key, field in GGUFReader(path).fields.items()}


def stored(folder: Path, name: str) -> Any:
    """The checkpoint's values of one tensor, as float32."""
    tensor = Checkpoint.open(folder).tensors[name]
    return to_f32(tensor.read(), tensor.dtype).reshape(tensor.shape)


@pytest.fixture(params=[1 << 18, 1000], ids=["large-chunks", "chunks-that-cut-rows"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "CHUNK_ELEMENTS", request.param)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("outtype", ["F32", "F16", "BF16"])
def test_values_arrive(checkpoint: Path, tmp_path: Path, outtype: FloatType) -> None:
    tensors = convert_to(tmp_path / "x.gguf", Source(checkpoint), outtype)
    embedding = stored(checkpoint, "model.language_model.embed_tokens.weight")
    expected = convert(embedding, "F32", outtype)
    np.testing.assert_array_equal(
        tensors["token_embd.weight"].data.view(np.uint8), np.ascontiguousarray(expected).view(np.uint8)
    )
    norm = stored(checkpoint, "mtp.layers.0.input_layernorm.weight")
    np.testing.assert_array_equal(tensors["blk.8.attn_norm.weight"].data, norm + 1)
    gated = stored(checkpoint, "model.language_model.layers.0.linear_attn.norm.weight")
    np.testing.assert_array_equal(tensors["blk.0.ssm_norm.weight"].data, gated)
    logs = stored(checkpoint, "model.language_model.layers.1.linear_attn.A_log")
    tiled = logs.reshape(2, VALUE_HEADS // 2).T.reshape(-1)
    np.testing.assert_allclose(tensors["blk.1.ssm_a"].data, -np.exp(tiled), rtol=1e-6)


def test_keys(checkpoint: Path, tmp_path: Path) -> None:
    convert_to(tmp_path / "x.gguf", Source(checkpoint), "BF16")
    found = keys(tmp_path / "x.gguf")
    expected = {
        "general.architecture": "qwen35",
        "general.name": "Random 1B",
        "general.file_type": 32,
        "general.sampling.top_k": 20,
        "qwen35.block_count": 9,
        "qwen35.nextn_predict_layers": 1,
        "qwen35.embedding_length": HIDDEN,
        "qwen35.rope.dimension_sections": [2, 1, 1, 0],
        "qwen35.rope.dimension_count": 8,
        "qwen35.attention.recurrent_layers": [True, True, True, False] * 2 + [False],
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.eos_token_id": 261,
    }
    assert {key: found.get(key) for key in expected} == expected
    assert len(found["tokenizer.ggml.tokens"]) == VOCAB


def test_sampling_licence_and_source(checkpoint: Path, tmp_path: Path) -> None:
    edit_json(checkpoint / "generation_config.json", repetition_penalty=1.05)
    (checkpoint / "README.md").write_text(
        "---\nlicense: apache-2.0\nbase_model: Someone/Base-2B\n---\nA card.\n"
    )
    source = Source(checkpoint, repo_id="Someone/Tiny-1.5-2B", revision="abc")
    convert_to(tmp_path / "x.gguf", source)
    found = keys(tmp_path / "x.gguf")
    assert found["general.sampling.penalty_repeat"] == pytest.approx(1.05)
    assert found["general.name"] == "Tiny 1.5 2B"
    assert found["general.license"] == "apache-2.0"
    assert found["general.base_model.0.repo_url"] == "https://huggingface.co/Someone/Base-2B"
    assert found["general.source.repo_url"] == "https://huggingface.co/Someone/Tiny-1.5-2B"
    assert found["general.source.url"].endswith("/tree/abc")


def test_a_longer_context_by_yarn(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["text_config"]["rope_parameters"] |= {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
    }
    edit_json(checkpoint / "config.json", **config)
    convert_to(tmp_path / "x.gguf", Source(checkpoint))
    found = keys(tmp_path / "x.gguf")
    assert found["qwen35.rope.scaling.type"] == "yarn"
    assert found["qwen35.rope.scaling.factor"] == 4.0
    assert found["qwen35.rope.scaling.original_context_length"] == 4096
    assert "qwen35.rope.scaling.attn_factor" not in found


def test_pruning_rewrites_what_is_counted_by_layer(checkpoint: Path, tmp_path: Path) -> None:
    whole = convert_to(tmp_path / "whole.gguf", Source(checkpoint))
    pruned = convert_to(tmp_path / "pruned.gguf", Source(checkpoint), dropped=(0, 1, 2, 3))
    found = keys(tmp_path / "pruned.gguf")
    assert found["qwen35.block_count"] == 5
    assert found["qwen35.nextn_predict_layers"] == 1
    assert found["qwen35.attention.recurrent_layers"] == [True, True, True, False, False]
    for name in ("attn_qkv.weight", "ssm_a"):
        np.testing.assert_array_equal(pruned[f"blk.0.{name}"].data, whole[f"blk.4.{name}"].data)
    np.testing.assert_array_equal(
        pruned["blk.4.nextn.eh_proj.weight"].data, whole["blk.8.nextn.eh_proj.weight"].data
    )


def test_a_weight_beyond_f16_is_named(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "big", dtype="F32")
    shard = checkpoint / "model-00001-of-00002.safetensors"
    tensors = [(t.name, t.dtype, t.read().reshape(t.shape)) for t in read_header(shard)]
    tensors[0][2][3, 5] = 70000
    write_file(shard, tensors, {})
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight: 70000 .* --outtype BF16 or F32"):
        convert_to(tmp_path / "x.gguf", Source(checkpoint))
    convert_to(tmp_path / "x.gguf", Source(checkpoint), "BF16")


def spoil(folder: Path, name: str, value: float) -> None:
    """Writes `value` into the middle of a tensor."""
    tensor = Checkpoint.open(folder).tensors[name]
    tensors = [(t.name, t.dtype, t.read().reshape(t.shape)) for t in read_header(tensor.path)]
    values = next(values for other, _, values in tensors if other == name).reshape(-1)
    values[len(values) // 2] = convert(np.array([value], np.float32), "F32", tensor.dtype)[0]
    write_file(tensor.path, tensors, {})


TEXT = "model.language_model."


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("outtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(
    ("name", "does"),
    [
        (f"{TEXT}embed_tokens.weight", "holds"),
        (f"{TEXT}layers.0.linear_attn.in_proj_qkv.weight", "holds"),  # reordered
        ("mtp.layers.0.input_layernorm.weight", "becomes"),  # computed
    ],
)
def test_a_weight_that_is_not_finite_is_named(
    checkpoint: Path, tmp_path: Path, name: str, does: str, outtype: FloatType, value: float
) -> None:
    spoil(checkpoint, name, value)
    expected = rf"safetensors: tensor {re.escape(name)} {does} {value}, and every weight must be finite"
    with pytest.raises(CheckpointError, match=expected):
        convert_to(tmp_path / "x.gguf", Source(checkpoint), outtype)


@pytest.mark.filterwarnings("error")
def test_a_weight_that_becomes_infinite_is_named(checkpoint: Path, tmp_path: Path) -> None:
    name = f"{TEXT}layers.1.linear_attn.A_log"
    spoil(checkpoint, name, 89.0)
    with pytest.raises(CheckpointError, match=rf"{name} becomes -inf, and every"):
        convert_to(tmp_path / "x.gguf", Source(checkpoint))


def test_one_expert_that_is_not_finite_is_named(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "experts", experts="fused")
    spoil(checkpoint, f"{TEXT}layers.0.mlp.experts.down_proj", np.nan)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts\.down_proj holds nan"):
        convert_to(tmp_path / "x.gguf", Source(checkpoint))
