"""What transformers' own classes save, and folders that tools changed: our GGUF against the model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_serve.convert.checkpoint import INDEX, Checkpoint
from tests.checkpoints import edit_json, model_config, vision_config, write_tokenizer
from tests.logits import gguf_log_probabilities, log_softmax, mean_kl_divergence
from tests.reference.test_levels import converted

torch = pytest.importorskip("torch", reason="the extra `reference`")
transformers = pytest.importorskip("transformers", reason="the extra `reference`")

pytestmark = pytest.mark.reference

LENGTH = 48
NESTED = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
ALONE = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")


def model(name: str, tied: bool) -> Any:
    """A random one of a class of transformers."""
    whole = model_config(layers=4, mtp=False, experts="Moe" in name, tied=tied)
    text = {key: value for key, value in whole["text_config"].items() if key != "model_type"}
    if name in NESTED:
        tower = {key: value for key, value in vision_config().items() if key != "model_type"}
        config = getattr(transformers, name).config_class(
            text_config=text, vision_config=tower, tie_word_embeddings=tied
        )
    else:
        config = getattr(transformers, name).config_class(**text)
    made, generator = getattr(transformers, name)(config), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    return made.eval()


def saved(one: Any, folder: Path, **how: Any) -> Path:
    one.save_pretrained(folder, **how)
    write_tokenizer(folder)
    return folder


def divergence(one: Any, folder: Path) -> float:
    """Of the GGUF of a folder from a model."""
    ids = np.random.default_rng(1).integers(0, 256, (1, LENGTH), dtype=np.int32)
    with torch.no_grad():
        logits = one(input_ids=torch.from_numpy(ids).long()).logits.float().numpy()
    ours = gguf_log_probabilities(converted(folder), ids, np.arange(LENGTH))
    return mean_kl_divergence(log_softmax(logits), ours)


@pytest.mark.parametrize("name", [*NESTED, *ALONE])
@pytest.mark.parametrize("tied", [True, False])
def test_classes_save(tmp_path: Path, name: str, tied: bool) -> None:
    one = model(name, tied)
    assert divergence(one, saved(one, tmp_path / "x", max_shard_size="200KB")) < 1e-5


@pytest.mark.parametrize("rows", [352, 290])
def test_another_number_of_tokens(tmp_path: Path, rows: int) -> None:
    one = model(NESTED[0], False)
    one.resize_token_embeddings(rows, mean_resizing=False)
    assert divergence(one, saved(one, tmp_path / "x")) < 1e-5


def older(folder: Path) -> None:
    """Keys as transformers 4 wrote them."""
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    rope = text.pop("rope_parameters")
    text |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor")}
    text["rope_scaling"] = {"type": "default", "rope_type": "default", "mrope_section": rope["mrope_section"]}
    edit_json(folder / "config.json", text_config=text, torch_dtype="float32")


def no_layer_types(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["text_config"]["layer_types"]
    edit_json(folder / "config.json", text_config=config["text_config"])


@pytest.mark.parametrize("change", [older, no_layer_types])
def test_configurations(tmp_path: Path, change: Callable[[Path], None]) -> None:
    folder = saved(model(NESTED[0], False), tmp_path / "x")
    change(folder)
    read = getattr(transformers, NESTED[0]).from_pretrained(folder, dtype=torch.float32).eval()
    assert divergence(read, folder) < 1e-5


def test_which_of_several_files_is_read(tmp_path: Path) -> None:
    """A model merged into one file, in the folder of the older shards and their index."""
    folder = saved(model(NESTED[0], False), tmp_path / "x", max_shard_size="100KB")
    index = (folder / INDEX).read_text()
    newer = model(NESTED[0], False)
    with torch.no_grad():
        for parameter in newer.parameters():
            parameter.mul_(0.7)
    shards = {path: path.read_bytes() for path in folder.glob("model-*.safetensors")}
    newer.save_pretrained(folder)
    (folder / INDEX).write_text(index)
    for path, data in shards.items():
        path.write_bytes(data)
    read = getattr(transformers, NESTED[0]).from_pretrained(folder, dtype=torch.float32).eval()
    assert divergence(read, folder) < 1e-5
    assert divergence(newer, folder) < 1e-5


def test_layers_in_another_order(tmp_path: Path) -> None:
    """Layers in another order than every fourth: as mergers leave them."""
    config = getattr(transformers, ALONE[0]).config_class(
        **{
            **{
                k: v for k, v in model_config(layers=6, mtp=False)["text_config"].items() if k != "model_type"
            },
            "layer_types": [
                "full_attention",
                *["linear_attention"] * 2,
                *["full_attention"] * 2,
                "linear_attention",
            ],
        }
    )
    one = getattr(transformers, ALONE[0])(config).eval()
    folder = saved(one, tmp_path / "x")
    assert Checkpoint.open(folder).config.layer_types[0] == "full_attention"
    assert divergence(one, folder) < 1e-5
