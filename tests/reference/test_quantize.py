"""Quantized files equal llama-quantize's, byte for byte, and the importance matrix lowers the divergence."""

from pathlib import Path

import pytest
from gguf import GGUFReader

from qwen_serve.bench.servers.builds import build_programs
from qwen_serve.convert.calibration import write_text
from qwen_serve.convert.imatrix import collect_imatrix
from qwen_serve.convert.kld import OWN, measure_divergence
from qwen_serve.convert.quantize import quantize
from qwen_serve.convert.recipes import Recipe, load_recipe
from qwen_serve.llamacpp.evaluation import Runtime
from tests.reference.test_imatrix import run

pytestmark = pytest.mark.reference

RUNTIME = Runtime(threads=1, n_gpu_layers=0)


@pytest.fixture(scope="module")
def quantizer() -> Path:
    return build_programs(["llama-quantize"], patched=False) / "llama-quantize"


@pytest.fixture(scope="module")
def converted(nano_q4_k_m: Path) -> Path:
    """The folder of a conversion, with nano-F16.gguf and nano.imatrix.gguf."""
    return nano_q4_k_m.parent


@pytest.mark.parametrize("level", ["Q4_K_M", "Q3_K_M", "Q2_K", "IQ4_XS", "Q6_K", "Q5_K_S"])
@pytest.mark.parametrize("plain", [True, False], ids=["plain type", "recipe"])
def test_the_file_is_llama_quantizes(
    level: str, plain: bool, converted: Path, quantizer: Path, tmp_path: Path
) -> None:
    """With the same imatrix, type and overrides: metadata, tensor types and data, to the last byte."""
    recipe = load_recipe(level)
    if plain:
        recipe = Recipe.model_validate({"type": level, "about": "as llama.cpp has it"})
    source, imatrix = converted / "nano-F16.gguf", converted / "nano.imatrix.gguf"
    quantize(source, tmp_path / "ours.gguf", recipe=recipe, imatrix=imatrix, runtime=RUNTIME)
    flags = [part for o in recipe.override for part in ("--tensor-type", f"{o.pattern}={o.type}")]
    command = [quantizer, *flags, "--imatrix", imatrix.name, source, tmp_path / "theirs.gguf", level, 1]
    run(command, converted)
    ours, theirs = GGUFReader(tmp_path / "ours.gguf"), GGUFReader(tmp_path / "theirs.gguf")
    assert [t.name for t in ours.tensors] == [t.name for t in theirs.tensors]
    for a, b in zip(ours.tensors, theirs.tensors, strict=True):
        assert a.tensor_type == b.tensor_type, a.name
        assert a.data.tobytes() == b.data.tobytes(), a.name
    assert (tmp_path / "ours.gguf").read_bytes() == (tmp_path / "theirs.gguf").read_bytes()


def test_the_importance_matrix_lowers_the_divergence(nano_f16: Path, tmp_path: Path) -> None:
    """With the pipeline's defaults: two texts of the model, and the matrix of the first one."""
    calibration, evaluation, imatrix = (
        tmp_path / name for name in ("calibration.txt", "evaluation.txt", "imatrix.gguf")
    )
    write_text(nano_f16, calibration, purpose="calibration", runtime=RUNTIME)
    write_text(nano_f16, evaluation, purpose="evaluation", runtime=RUNTIME)
    collect_imatrix(nano_f16, imatrix, text=calibration, runtime=RUNTIME)
    means = []
    for taken in (None, imatrix):
        out = tmp_path / "q.gguf"
        quantize(nano_f16, out, recipe=load_recipe("Q2_K"), imatrix=taken, runtime=RUNTIME)
        divergence = measure_divergence(nano_f16, out, texts={OWN: evaluation}, runtime=RUNTIME)[OWN]
        assert divergence.tokens >= 32_768
        means.append(divergence.mean)
    without, with_ = means
    assert with_ < 0.95 * without
