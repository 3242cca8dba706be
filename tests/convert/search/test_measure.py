"""Weights changed in place are quantized as by llama.cpp, diverge like a file's, and are restored exactly."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader

from qwen_serve.convert import kld
from qwen_serve.convert.chunks import read_chunks
from qwen_serve.convert.imatrix import Imatrix
from qwen_serve.convert.quantize import quantize
from qwen_serve.convert.recipes import Recipe
from qwen_serve.convert.search import measure
from qwen_serve.convert.search.groups import TYPES, patterns, read_layout
from qwen_serve.convert.search.measure import Meter
from qwen_serve.llamacpp.evaluation import Batch, EvalContext, Runtime
from qwen_serve.llamacpp.weights import Weights, dequantize_rows, quantize_rows

RUNTIME = Runtime(threads=1, n_gpu_layers=0)
PROMPTS = Path(kld.__file__).parent / "calibration" / "prompts.toml"


def recipe_of(types: dict[str, Type]) -> Recipe:
    overrides = [{"pattern": patterns([n])[0], "type": k.name, "reason": "test"} for n, k in types.items()]
    return Recipe.model_validate({"type": "Q8_0", "about": "test", "override": overrides})


@pytest.fixture(scope="module")
def f16(nano_q4_k_m: Path) -> Path:
    return nano_q4_k_m.with_name("nano-F16.gguf")


@pytest.fixture(scope="module")
def imatrix(nano_q4_k_m: Path) -> Path:
    return nano_q4_k_m.with_name("nano.imatrix.gguf")


def test_rows_are_quantized_as_llama_quantize_does(f16: Path, imatrix: Path, tmp_path: Path) -> None:
    blocks = {kind: f"blk.{i % 8}.ffn_down.weight" for i, kind in enumerate(TYPES[:8])}
    blocks[Type.Q8_0] = "blk.8.nextn.eh_proj.weight"
    quantize(
        f16,
        tmp_path / "q.gguf",
        recipe=recipe_of({name: kind for kind, name in blocks.items()}),
        imatrix=imatrix,
        runtime=RUNTIME,
    )
    made = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "q.gguf").tensors}
    entries = Imatrix.load(imatrix).entries
    with RUNTIME.load(f16, writable=True) as model:
        weights = Weights(model)
        for kind, name in blocks.items():
            assert made[name].tensor_type == kind
            data = quantize_rows(weights.values(name), kind, entries[name].means, 2)
            assert np.array_equal(data[0], made[name].data), kind.name


def test_weights_are_all_found_and_put_back(f16: Path) -> None:
    with RUNTIME.load(f16, writable=True) as model, EvalContext(model, n_ctx=32, n_batch=8) as context:

        def logits() -> np.ndarray:
            context.clear()
            batch = Batch(context)
            for position in range(6):
                batch.add(300 + position, position, output=True)
            context.decode(batch)
            return context.logits().copy()

        weights = Weights(model)
        assert all(t.name in weights for t in GGUFReader(f16).tensors if t.name.endswith(".weight"))
        before = logits()
        for name in ("token_embd.weight", "blk.0.ssm_out.weight"):
            whole = weights.values(name)
            weights.set(name, dequantize_rows(quantize_rows(whole, Type.Q4_K, None), Type.Q4_K))
            assert not np.array_equal(logits(), before)
            assert np.array_equal(weights.values(name), whole)
            assert list(weights.changed()) == [name]
            weights.restore(name)
            assert np.array_equal(logits(), before)


@pytest.mark.slow
def test_a_reading_is_that_of_a_file(
    f16: Path, imatrix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except for rounding of activations in the kernels for quantized weights."""
    monkeypatch.setattr(measure, "CHUNKS", 2)
    monkeypatch.setattr(kld, "MIN_TOKENS", 1024)
    layout = read_layout(f16, extra=1024, used_experts=None)
    types = {m.name: Type.Q3_K for m in layout.matrices}
    text = tmp_path / "text.txt"
    with Meter(f16, PROMPTS, imatrix, RUNTIME) as meter:
        assert meter.tokens == 1024
        reading = meter.measure(types, mtp={m.name for m in layout.matrices if m.mtp})
        nothing = meter.measure({})
        assert (nothing.mean, nothing.same_top, nothing.draft) == (0.0, 1.0, None)
        one = {"blk.0.ffn_up.weight": Type.Q3_K}
        assert 0 < meter.measure(one).mean < reading.mean
        assert meter.measure(types, mtp={m.name for m in layout.matrices if m.mtp}) == reading
        errors = meter.errors(layout.matrices[0], (Type.Q2_K, Type.Q4_K, Type.Q8_0))
        assert errors[Type.Q2_K] > errors[Type.Q4_K] > errors[Type.Q8_0] > 0
        monkeypatch.setattr(measure, "SAMPLE_ELEMENTS", 1 << 13)
        sampled = meter.errors(layout.matrices[0], (Type.Q4_K,))
        assert sampled[Type.Q4_K] != errors[Type.Q4_K]
        assert sampled[Type.Q4_K] == pytest.approx(errors[Type.Q4_K], rel=0.3)
    with RUNTIME.load(f16) as model:
        chunks = measure.ends(read_chunks(model, PROMPTS), 2)
        text.write_bytes(model.detokenize(chunks.reshape(-1).tolist()) + b"\n" * 200)
    quantize(f16, tmp_path / "q.gguf", recipe=recipe_of(types), imatrix=imatrix, runtime=RUNTIME)
    assert (tmp_path / "q.gguf").stat().st_size <= layout.file_bytes(types)
    assert (tmp_path / "q.gguf").stat().st_size > layout.file_bytes(types) - 1024
    found = kld.measure_divergence(f16, tmp_path / "q.gguf", texts={kld.OWN: text}, runtime=RUNTIME)
    assert reading.draft is not None
    assert reading.mean == pytest.approx(found[kld.OWN].mean, rel=0.1)


def test_a_probe_reads_both_ends_of_the_text() -> None:
    chunks = np.arange(12, dtype=np.int32)[:, None]
    assert measure.ends(chunks, 5)[:, 0].tolist() == [0, 1, 2, 10, 11]
    assert measure.ends(chunks, 1)[:, 0].tolist() == [0]
    assert measure.ends(chunks, 12) is chunks
