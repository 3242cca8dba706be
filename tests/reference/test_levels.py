"""What decides in a config.json, and heads beside tied embeddings: our GGUF against transformers' model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_serve.convert.checkpoint import Checkpoint
from qwen_serve.convert.config import ModelConfig
from qwen_serve.convert.gguf_file import write_gguf
from qwen_serve.convert.source import Source
from qwen_serve.convert.tensors import plan_tensors
from tests.checkpoints import edit_json, model_config, set_tied, write_checkpoint
from tests.logits import gguf_log_probabilities, log_softmax, mean_kl_divergence

torch = pytest.importorskip("torch", reason="the extra `reference`")
transformers = pytest.importorskip("transformers", reason="the extra `reference`")

pytestmark = pytest.mark.reference

LENGTH = 300
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def converted(folder: Path) -> Path:
    checkpoint = Checkpoint.open(folder)
    kept = tuple(range(checkpoint.config.n_layers))
    path = folder.with_suffix(".gguf")
    write_gguf(path, checkpoint, Source(folder), plan_tensors(checkpoint, "F32", kept), kept, "F32")
    return path


def divergence(folder: Path, kind: Any) -> float:
    """Of the GGUF from transformers' model, over rows up to the last of `LENGTH`."""
    ids = np.random.default_rng(1).integers(0, 256, (1, LENGTH), dtype=np.int32)
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids).long()).logits.numpy()
    ours = gguf_log_probabilities(converted(folder), ids, np.arange(LENGTH))
    return mean_kl_divergence(log_softmax(logits), ours)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(("outer", "inner"), [(True, True), (False, True), (None, True), (True, False)])
@pytest.mark.parametrize("tied", [True, False])
def test_heads(tmp_path: Path, nested: bool, outer: bool | None, inner: bool, tied: bool) -> None:
    """Tied as transformers ties them; a head of its own stays. Without a head, transformers draws one at
    random where we take the embedding, by the level that says so."""
    if tied and not (outer if nested else inner):
        pytest.skip("transformers draws a head at random")
    folder = write_checkpoint(tmp_path / "x", layers=4, tied=tied, nested=nested, dtype="F32", vision=nested)
    kind = transformers.Qwen3_5ForConditionalGeneration if nested else transformers.Qwen3_5ForCausalLM
    assert divergence(set_tied(folder, outer, inner), kind) < 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": YARN | {"mrope_section": [2, 1, 1]}},
        {"rope_scaling": YARN | {"mrope_section": [2, 1, 1], "rope_theta": 1e6, "attention_factor": 1.3}},
        {"rope_scaling": {"rope_type": "linear", "factor": 3.0, "mrope_section": [2, 1, 1]}},
        {"rope_parameters": None, "rope_theta": 5e5, "partial_rotary_factor": 0.5},
        {"rope_parameters": YARN | {"mrope_section": [2, 1, 1]}, "original_max_position_embeddings": 32},
        {"rms_norm_eps": 0.1},
    ],
)
@pytest.mark.parametrize("level", ["outer", "inner", "flat"])
def test_rows_of_a_long_context(tmp_path: Path, changes: dict[str, Any], level: str) -> None:
    """Each change on each level: in text_config and alone it holds, on the outer one it does not."""
    nested = level != "flat"
    if level == "outer" and "yarn" in str(changes):
        pytest.skip("transformers cannot read such a configuration")
    folder = write_checkpoint(tmp_path / "x", layers=4, nested=nested, dtype="F32", vision=nested)
    config = json.loads((folder / "config.json").read_text())
    (config["text_config"] if level == "inner" else config).update(changes)
    edit_json(folder / "config.json", **config)
    kind = transformers.Qwen3_5ForConditionalGeneration if nested else transformers.Qwen3_5ForCausalLM
    assert divergence(folder, kind) < 1e-5


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("nested", [True, False])
def test_every_value_is_from_transformers_level(tmp_path: Path, experts: bool, nested: bool) -> None:
    """For each key: left out on the inner level, and another value on the outer one."""
    names = {
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "head_dim": "head_dim",
        "hidden_size": "hidden_size",
        "linear_conv_kernel_dim": "conv_kernel",
        "linear_num_value_heads": "linear_value_heads",
        "max_position_embeddings": "max_positions",
        "rms_norm_eps": "rms_norm_eps",
        "vocab_size": "vocab_size",
    }
    from transformers import AutoConfig

    for key, name in names.items():
        for outer in (True, False):
            config = model_config(nested=nested, experts=experts)
            config["model_type"] = config["model_type"].removesuffix("_text") + ("" if nested else "_text")
            inner = config["text_config"] if nested else config
            kept = inner.pop(key)
            if outer:
                config[key] = 2 * kept if key != "linear_conv_kernel_dim" else 5
            (tmp_path / "config.json").write_text(json.dumps(config))
            theirs = AutoConfig.from_pretrained(tmp_path).get_text_config()
            assert getattr(ModelConfig.from_json(config), name) == getattr(theirs, key), key


def test_a_text_model_with_the_whole_models_config(tmp_path: Path) -> None:
    """AutoModelForCausalLM gives the text model alone, of which text_config decides everything."""
    folder = write_checkpoint(tmp_path / "x", layers=4, tied=False, dtype="F32", vision=True)
    edit_json(folder / "config.json", architectures=["Qwen3_5ForCausalLM"])
    set_tied(folder, True, False)
    assert divergence(folder, transformers.AutoModelForCausalLM) < 1e-5
    assert Checkpoint.open(folder).config.remarks == ()
