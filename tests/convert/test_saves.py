"""Checkpoints as trainers, quantizers and mergers leave them: the GGUF of the plain one, or a reason."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_serve.convert.checkpoint import INDEX, Checkpoint, read_tensors
from qwen_serve.convert.errors import CheckpointError
from qwen_serve.convert.gguf_file import write_gguf
from qwen_serve.convert.safetensors import read_header, write_file
from qwen_serve.convert.source import Source
from qwen_serve.convert.tensors import plan_tensors
from qwen_serve.convert.vocab import Vocab
from qwen_serve.llamacpp.gguf import read_header as read_gguf
from tests.checkpoints import edit_json, write_checkpoint
from tests.prequantized import METHODS, write_prequantized

LAYERS = 4
Change = Callable[[Path], object]


def made(folder: Path) -> bytes:
    """The GGUF."""
    checkpoint, kept = Checkpoint.open(folder), tuple(range(LAYERS))
    out = folder.parent / "out.gguf"
    write_gguf(out, checkpoint, Source(folder), plan_tensors(checkpoint, "F16", kept), kept, "F16")
    return out.read_bytes()


def rewritten(folder: Path, rename: Callable[[str], str], *more: tuple[str, str, Any]) -> None:
    """All tensors in one file under other names, with some more."""
    parts = [(rename(n), t.dtype, t.read().reshape(t.shape)) for n, t in read_tensors(folder).items()]
    for path in (folder / INDEX, *folder.glob("*.safetensors")):
        path.unlink(missing_ok=True)
    write_file(folder / "model.safetensors", [*parts, *more], {"format": "pt"})


def as_it_is(name: str) -> str:
    return name


def head_of_a_trainer(folder: Path) -> None:
    rewritten(folder, as_it_is, ("v_head.summary.weight", "F32", np.ones((1, 64), np.float32)))


def rotary_tables(folder: Path) -> None:
    names = ("model.rotary_emb.inv_freq", "model.layers.3.self_attn.rotary_emb.inv_freq")
    rewritten(folder, as_it_is, *((name, "F32", np.ones(4, np.float32)) for name in names))


def heads_in_a_file(folder: Path, name: str) -> None:
    """The MTP head in a file that the index does not know."""
    tensors = read_tensors(folder)
    parts = [(n, t.dtype, t.read().reshape(t.shape)) for n, t in tensors.items()]
    for path in (folder / INDEX, *folder.glob("*.safetensors")):
        path.unlink()
    write_file(folder / name, [part for part in parts if part[0].startswith("mtp.")], {"format": "pt"})
    rest = [part for part in parts if not part[0].startswith("mtp.")]
    write_file(folder / "model.safetensors", rest, {"format": "pt"})


def without_architectures(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))


def mrope(folder: Path) -> None:
    """As Qwen2-VL's configurations have it."""
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    config |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor")}
    config["model_type"] = "qwen3_5_text"
    (folder / "config.json").write_text(json.dumps(config))


def shards_without_index(folder: Path) -> None:
    for path in sorted(folder.glob("model-*.safetensors")):
        path.rename(folder / path.name.replace("model-", "model.safetensors-"))
    (folder / INDEX).unlink()


SAVES: dict[str, Change] = {
    "torch.compile": lambda folder: rewritten(folder, lambda name: f"_orig_mod.{name}"),
    "DDP": lambda folder: rewritten(folder, lambda name: f"module.{name}"),
    "PEFT": lambda folder: rewritten(folder, lambda name: f"base_model.model.{name}"),
    "compiled in DDP": lambda folder: rewritten(folder, lambda name: f"module._orig_mod.{name}"),
    "head of a trainer": head_of_a_trainer,
    "rotary tables": rotary_tables,
    "model_mtp.safetensors": lambda folder: heads_in_a_file(folder, "model_mtp.safetensors"),
    "mtp.safetensors": lambda folder: heads_in_a_file(folder, "mtp.safetensors"),
    "no architectures": without_architectures,
    "mrope": mrope,
    "official shards, no index": shards_without_index,
}


@pytest.mark.parametrize("name", SAVES)
def test_the_file_is_the_same(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path / "x", layers=LAYERS, tied=False, nested=False)
    edit_json(folder / "config.json", model_type="qwen3_5_text")
    before = made(folder)
    SAVES[name](folder)
    assert made(folder) == before


def test_a_foreign_head_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "x", layers=LAYERS)
    head_of_a_trainer(folder)
    (remark,) = Checkpoint.open(folder).config.remarks
    assert "v_head.summary.weight: no part of the language model" in remark


@pytest.mark.parametrize("old_shards", [True, False])
def test_one_file_takes_precedence_over_an_older_index(
    tmp_path: Path, old_shards: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in transformers: what was merged and saved in one file, into the folder of the shards before."""
    folder = write_checkpoint(tmp_path / "x", layers=LAYERS)
    newer = write_checkpoint(tmp_path / "newer", layers=LAYERS, seed=1)
    rewritten(newer, as_it_is)
    (newer / "model.safetensors").rename(folder / "model.safetensors")
    if not old_shards:
        for path in folder.glob("model-*.safetensors"):
            path.unlink()
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    stored = {tensor.name: tensor for tensor in read_header(folder / "model.safetensors")}
    assert (Checkpoint.open(folder).tensors[name].read() == stored[name].read()).all()
    assert (
        f"model.safetensors is read, as in transformers; {INDEX} names other files" in capsys.readouterr().err
    )


def test_an_index_may_name_the_one_file_and_another(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "x", layers=LAYERS)
    before = made(folder)
    heads_in_a_file(folder, "model_extra.safetensors")
    names = {tensor.name: path.name for path in folder.glob("*.safetensors") for tensor in read_header(path)}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert made(folder) == before


def test_pickled_weights_are_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "x", layers=LAYERS)
    for path in (folder / INDEX, *folder.glob("*.safetensors")):
        path.unlink()
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is pickled: save it with"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("kind", ["linear_attention", "full_attention"])
def test_layers_of_one_kind_are_refused(tmp_path: Path, kind: str) -> None:
    """llama.cpp ends the process when it computes such a model."""
    folder = write_checkpoint(tmp_path / "x", layers=LAYERS, nested=False)
    edit_json(folder / "config.json", layer_types=[kind] * LAYERS)
    with pytest.raises(CheckpointError, match=f"layer_types has {kind} alone"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("file", "method"), [("quantize_config.json", "gptq"), ("quant_config.json", "awq"), ("", "w4a16")]
)
def test_methods_that_stand_elsewhere(tmp_path: Path, file: str, method: Any) -> None:
    """AutoGPTQ's and AutoAWQ's own files, and compressed-tensors' older key."""
    weights = write_prequantized(tmp_path / "nano", method)
    said = {key: value for key, value in METHODS[method].items() if key != "quant_method" or not file}
    config = json.loads((tmp_path / "nano" / "config.json").read_text())
    del config["quantization_config"]
    if file:
        (tmp_path / "nano" / file).write_text(json.dumps(said))
    else:
        config["compression_config"] = said
    (tmp_path / "nano" / "config.json").write_text(json.dumps(config))
    tensors = Checkpoint.open(tmp_path / "nano").tensors
    for name, weight in weights.items():
        assert (tensors[name].read().reshape(weight.shape) == weight).all()


@pytest.mark.parametrize("value", [0, 1])
def test_biases_of_zero_beside_gptq(tmp_path: Path, value: int) -> None:
    write_prequantized(folder := tmp_path / "nano", "gptq")
    bias = "model.language_model.layers.0.mlp.up_proj.bias"
    rewritten(folder, as_it_is, (bias, "F16", np.full(768, value, np.float16)))
    checkpoint = Checkpoint.open(folder)
    kept = tuple(range(checkpoint.config.n_layers))
    if not value:
        plan_tensors(checkpoint, "F16", kept)
        return
    with pytest.raises(CheckpointError, match=f"no rule for tensor {bias}"):
        plan_tensors(checkpoint, "F16", kept)


def test_further_ends_of_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """generation_config.json may name several; the two that llama.cpp knows by their texts need no key."""
    folder = write_checkpoint(tmp_path / "x", layers=LAYERS)
    names = {
        token: id_ for id_, token in enumerate(Vocab.load(folder, Checkpoint.open(folder).config).tokens)
    }
    ids = [names[token] for token in ("<|im_end|>", "<|endoftext|>", "</think>")]
    edit_json(folder / "generation_config.json", eos_token_id=ids)
    made(folder)
    metadata = read_gguf(folder.parent / "out.gguf").metadata
    assert metadata["tokenizer.ggml.eot_token_id"] == names["</think>"]
    assert "tokenizer.ggml.eom_token_id" not in metadata
    edit_json(folder / "generation_config.json", eos_token_id=[300, 301, 302])
    made(folder)
    assert "eos_token_id also has [PAD302]" in capsys.readouterr().err


def test_texts_that_yaml_reads_as_numbers(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "x", layers=LAYERS)
    (folder / "README.md").write_text(
        "---\nmodel_name: 5\nlicense: [apache-2.0]\ntags: [1, 2024-01-01]\nbase_model:\n- a/b\n---\n"
    )
    made(folder)
    metadata = read_gguf(folder.parent / "out.gguf").metadata
    assert metadata["general.name"] == "5"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("repetition_penalty", "1.05"),
        ("top_k", 20.5),
        ("top_p", True),
        ("top_k", math.inf),
        ("top_k", 10**400),
    ],
)
def test_sampling_of_other_types_is_named(tmp_path: Path, key: str, value: object) -> None:
    folder = write_checkpoint(tmp_path / "x", layers=LAYERS)
    edit_json(folder / "generation_config.json", **{key: value})
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {key} is .*; want a"):
        made(folder)
    edit_json(folder / "generation_config.json", **{key: 1.0})
    made(folder)


def test_tokenizers_without_some_files(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "x", layers=LAYERS)
    edit_json(folder / "tokenizer_config.json", chat_template=None)
    config = Checkpoint.open(folder).config
    before = Vocab.load(folder, config)
    (folder / "tokenizer_config.json").unlink()
    after = Vocab.load(folder, config)
    assert (after.tokens, after.types, after.merges) == (before.tokens, before.types, before.merges)
    assert after.special_ids["eos"] == config.special_token_ids["eos"]
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    with pytest.raises(CheckpointError, match=r"vocab\.json and no tokenizer\.json"):
        Vocab.load(folder, config)


def test_added_tokens_that_take_spaces_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path / "x", layers=LAYERS)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"][-1]["lstrip"] = True
    edit_json(folder / "tokenizer.json", **tokenizer)
    Vocab.load(folder, Checkpoint.open(folder).config)
    assert "has lstrip, which llama.cpp does not apply" in capsys.readouterr().err
