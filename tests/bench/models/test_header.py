"""Files without weights have the types of quantized files, and their headers are read like those of whole
files."""

import json
from pathlib import Path

import pytest

from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.models.header import float_tensors, quantized_tensors, write_header
from qwen_serve.convert.config import ModelConfig
from qwen_serve.convert.recipes import load_recipe
from qwen_serve.llamacpp.gguf import read_header
from qwen_serve.server.engine.planning.spec import ModelSpec

NANO = Path(__file__).parents[3] / "models" / "nano"


@pytest.fixture(scope="module")
def nano() -> ModelConfig:
    return ModelConfig.from_json(json.loads((NANO / "config.json").read_text()))


def test_the_types_are_those_of_the_quantized_file(
    nano: ModelConfig, nano_f16: Path, nano_q4_k_m: Path, nano_q2_k: Path
) -> None:
    key = str
    assert sorted(float_tensors(nano), key=key) == sorted(read_header(nano_f16).tensors.values(), key=key)
    for level, path in (("Q4_K_M", nano_q4_k_m), ("Q2_K", nano_q2_k)):
        made = quantized_tensors(nano, load_recipe(level))
        assert sorted(made, key=key) == sorted(read_header(path).tensors.values(), key=key)


def test_the_file_is_all_header(nano: ModelConfig, nano_q4_k_m: Path, tmp_path: Path) -> None:
    path = tmp_path / "header.gguf"
    tensors = quantized_tensors(nano, load_recipe("Q4_K_M"))
    write_header(path, nano, tensors)
    assert list(read_header(path).tensors.values()) == tensors
    assert path.stat().st_blocks * 512 < path.stat().st_size / 4
    assert ModelSpec.from_header(read_header(path)) == ModelSpec.from_header(read_header(nano_q4_k_m))


def test_what_a_pruned_model_has_is_not_known(nano: ModelConfig, tmp_path: Path) -> None:
    recipe = tmp_path / "pruned.toml"
    recipe.write_text('type = "Q4_K_M"\nabout = "fewer words"\n[vocab]\nkeep = 300\n')
    with pytest.raises(BenchError, match="a recipe that prunes"):
        quantized_tensors(nano, load_recipe(recipe))
