"""A file that is rounded again has the same types and offsets, and less divergence. Experts are included."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader

from qwen_serve.convert.chunks import read_chunks
from qwen_serve.convert.compensation.file import _File
from qwen_serve.convert.compensation.gram import Grams
from qwen_serve.convert.compensation.grids import GRIDS
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.kld import compare
from qwen_serve.convert.progress import Progress
from qwen_serve.convert.quantize import Rewriting, quantize
from qwen_serve.convert.recipes import load_recipe
from qwen_serve.llamacpp.evaluation import Runtime
from qwen_serve.llamacpp.gguf import read_header
from qwen_serve.llamacpp.weights import Weights

RUNTIME = Runtime(threads=1, n_gpu_layers=0)
PROMPTS = Path(__file__).parents[3] / "qwen_serve" / "convert" / "calibration" / "prompts.toml"


def divergences(source: Path, *quantized: Path, n_chunks: int) -> list[float]:
    """Mean divergence of each file from the source, over the first chunks of the prompts."""
    means = []
    with RUNTIME.load(source) as whole:
        chunks = read_chunks(whole, PROMPTS)[:n_chunks]
        for path in quantized:
            with RUNTIME.load(path) as model:
                means.append(float(compare(whole, model, chunks).divergence.mean()))
    return means


@pytest.mark.slow
def test_the_same_file_with_better_blocks(nano_q2_k: Path, tmp_path: Path) -> None:
    source, imatrix = (nano_q2_k.with_name(f"nano{end}.gguf") for end in ("-F16", ".imatrix"))
    recipe, out = load_recipe("Q2_K"), tmp_path / "q.gguf"
    quantize(source, out, recipe=recipe, imatrix=imatrix, runtime=RUNTIME, rewriting=Rewriting(PROMPTS))
    before, after = read_header(nano_q2_k).tensors, read_header(out).tensors
    assert before == after
    reader = GGUFReader(out)
    assert reader.get_field("quantize.method").contents() == "compensated"
    assert reader.get_field("quantize.method.dataset").contents() == "prompts.toml"
    same = {t.name: t.data.tobytes() for t in GGUFReader(nano_q2_k).tensors}
    for tensor in reader.tensors:
        rounded = tensor.tensor_type in GRIDS
        assert (tensor.data.tobytes() != same[tensor.name]) == rounded, tensor.name
    nearest, compensated = divergences(source, nano_q2_k, out, n_chunks=4)
    assert compensated < 0.8 * nearest


@pytest.mark.slow
def test_experts_are_rounded_by_what_they_read(nano_moe_f32: Path, tmp_path: Path) -> None:
    out, stock = tmp_path / "q.gguf", tmp_path / "stock.gguf"
    for path, text in ((out, PROMPTS), (stock, None)):
        recipe = load_recipe("Q3_K_M")
        rewriting = Rewriting(text) if text else None
        quantize(nano_moe_f32, path, recipe=recipe, imatrix=None, runtime=RUNTIME, rewriting=rewriting)
    same = {t.name: t.data for t in GGUFReader(stock).tensors}
    experts = [t for t in GGUFReader(out).tensors if "_exps." in t.name and t.tensor_type in GRIDS]
    assert experts
    for tensor in experts:
        for mine, theirs in zip(tensor.data, same[tensor.name], strict=True):
            assert mine.tobytes() != theirs.tobytes(), tensor.name
    nearest, compensated = divergences(nano_moe_f32, stock, out, n_chunks=2)
    assert compensated < nearest


def test_no_copy_is_kept_of_weights_that_were_replaced(
    nano_f16: Path, nano_q2_k: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copy(nano_q2_k, tmp_path))
    with RUNTIME.load(nano_f16, writable=True) as model, Progress("Compensation", 1, "tensors") as progress:
        weights = Weights(model, 1)
        tensors = read_header(copy).tensors
        fits = [n for n, t in tensors.items() if n in weights and GGMLQuantizationType(t.type) in GRIDS]
        name = min(fits, key=lambda name: tensors[name].n_elements)
        file = _File(copy, {name: tensors[name]}, weights, progress, np.array)
        before = weights.values(name)
        file.choose([name], name, Grams((), None, np.array))
        file.close()
        assert (weights.values(name) != before).any()
        assert not list(weights.changed())


@pytest.mark.parametrize(
    ("words", "why"),
    [(2, "at least one chunk"), (700, "tokens; compensation reads at most 512 here")],
)
def test_what_fails_leaves_no_file(
    words: int, why: str, nano_f16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"word {n}" for n in range(words)))
    monkeypatch.setattr("qwen_serve.convert.compensation.file.HIDDEN_BYTES", 512 * 256 * 4)
    with pytest.raises(ConvertError, match=why):
        quantize(
            nano_f16,
            tmp_path / "q.gguf",
            recipe=load_recipe("Q8_0"),
            imatrix=None,
            runtime=RUNTIME,
            rewriting=Rewriting(text),
        )
    assert not (tmp_path / "q.gguf").exists()
