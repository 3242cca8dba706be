"""Distillation: torch's model equals llama.cpp's, codes and types stay, and unseen text diverges less."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader
from gguf.quants import dequantize

from qwen_serve.convert.chunks import read_chunks
from qwen_serve.convert.compensation.grids import GRIDS
from qwen_serve.convert.compensation.packing import unpack
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.kld import compare
from qwen_serve.convert.quantize import Rewriting, quantize
from qwen_serve.convert.recipes import Recipe
from qwen_serve.llamacpp.evaluation import Runtime
from qwen_serve.llamacpp.gguf import read_header

torch = pytest.importorskip("torch", reason="the extra `distill`")
pytest.importorskip("transformers", reason="the extra `distill`")
pytestmark = pytest.mark.reference

RUNTIME = Runtime(threads=1, n_gpu_layers=0)
PROMPTS = Path(__file__).parents[2] / "qwen_serve" / "convert" / "calibration" / "prompts.toml"
OTHERS = {
    "ffn_up": "Q5_K",
    "ffn_gate": "Q3_K",
    "ffn_down": "IQ3_S",
    "attn_qkv": "IQ4_XS",
    "attn_gate": "Q4_K",
    "ssm_out": "Q8_0",
}


@pytest.fixture
def two_texts(tmp_path: Path) -> tuple[Path, Path]:
    """One to train on, and another."""
    lines = PROMPTS.read_text(encoding="utf-8").splitlines(keepends=True)
    paths = tmp_path / "one.txt", tmp_path / "other.txt"
    for start, path in enumerate(paths):
        path.write_text("".join(lines[start::2]), encoding="utf-8")
    return paths


def divergence(source: Path, quantized: Path, text: Path, n_chunks: int) -> float:
    """llama.cpp's, over the first chunks."""
    with RUNTIME.load(source) as whole, RUNTIME.load(quantized) as model:
        return float(compare(whole, model, read_chunks(whole, text)[:n_chunks]).divergence.mean())


def values_of(path: Path) -> list[np.ndarray]:
    return [dequantize(tensor.data, tensor.tensor_type) for tensor in GGUFReader(path).tensors]


def test_torch_s_model_is_llama_cpp_s(nano_f16: Path, tmp_path: Path) -> None:
    """For every type in use, including untrained ones, with reordered heads, and with a tied output head."""
    from qwen_serve.convert import distillation

    overrides = [{"pattern": name, "type": kind, "reason": "test"} for name, kind in OTHERS.items()]
    recipe = Recipe.model_validate({"type": "Q2_K", "about": "test", "override": overrides})
    quantize(nano_f16, tmp_path / "q.gguf", recipe=recipe, imatrix=None, runtime=RUNTIME)
    kinds = {Type(tensor.type) for tensor in read_header(tmp_path / "q.gguf").tensors.values()}
    assert kinds > {*GRIDS, Type.IQ3_S}
    header = read_header(nano_f16)
    # the model itself, since training would hide a small difference
    settings = distillation._settings(header)  # noqa: SLF001
    student = distillation._Student(header, tmp_path / "q.gguf", settings, torch.device("cpu"))  # noqa: SLF001
    with RUNTIME.load(nano_f16) as model:
        chunks = torch.tensor(read_chunks(model, PROMPTS)[:2].astype("int64"))
    assert student.divergence(chunks) == pytest.approx(
        divergence(nano_f16, tmp_path / "q.gguf", PROMPTS, 2), rel=0.01
    )
    shutil.copy(tmp_path / "q.gguf", tmp_path / "saved.gguf")
    student._path = tmp_path / "saved.gguf"  # noqa: SLF001
    student.save()
    for new, old in zip(*map(values_of, (tmp_path / "saved.gguf", tmp_path / "q.gguf")), strict=True):
        np.testing.assert_array_equal(new, old)  # untrained values are written as they were read


def test_a_few_steps_help_on_other_text(
    nano_q2_k: Path, two_texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qwen_serve.convert import distillation

    monkeypatch.setattr(distillation, "BATCH", 2)
    source = nano_q2_k.with_name("nano-F16.gguf")
    out, (text, other) = tmp_path / "q.gguf", two_texts
    shutil.copy(nano_q2_k, out)
    distillation.distill(source, out, text=text, steps=12, runtime=RUNTIME)
    assert read_header(out).tensors == read_header(nano_q2_k).tensors
    before = {tensor.name: tensor for tensor in GGUFReader(nano_q2_k).tensors}
    for tensor in GGUFReader(out).tensors:
        was, kind = before[tensor.name].data, tensor.tensor_type
        changed = tensor.data.tobytes() != was.tobytes()
        drafts = tensor.name.startswith("blk.8.")
        if kind == Type.Q2_K or tensor.name.endswith("norm.weight"):  # others may round back
            assert changed == (not drafts), tensor.name
        elif kind not in GRIDS or drafts:
            assert not changed, tensor.name
        if kind in GRIDS:
            new, old = (unpack(kind, data.reshape(len(was), -1)) for data in (tensor.data, was))
            for name in ("levels", "scales", "minima"):
                assert (getattr(new, name) == getattr(old, name)).all(), f"{tensor.name} {name}"
    assert divergence(source, out, other, 6) < 0.98 * divergence(source, nano_q2_k, other, 6)


def test_training_that_does_not_help_leaves_no_file(
    nano_f16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qwen_serve.convert import distillation

    monkeypatch.setattr(distillation, "RATE", 1e3)
    monkeypatch.setattr(distillation, "BATCH", 1)
    text = tmp_path / "text.txt"
    text.write_text("word " * 1200)
    recipe = Recipe.model_validate({"type": "Q8_0", "about": "test"})
    rewriting = Rewriting(text, compensate=False, distill=1)
    with pytest.raises(ConvertError, match=r"distillation did not help .* convert without --distill"):
        quantize(
            nano_f16, tmp_path / "q.gguf", recipe=recipe, imatrix=None, runtime=RUNTIME, rewriting=rewriting
        )
    assert not (tmp_path / "q.gguf").exists()


@pytest.mark.parametrize(("words", "why"), [(2, "at least one chunk"), (600, "needs two chunks of 512")])
def test_too_short_a_text(words: int, why: str, nano_f16: Path, tmp_path: Path) -> None:
    from qwen_serve.convert.distillation import distill

    text = tmp_path / "text.txt"
    text.write_text("word " * words)
    with pytest.raises(ConvertError, match=why):
        distill(nano_f16, tmp_path / "none.gguf", text=text, steps=1, runtime=RUNTIME)
