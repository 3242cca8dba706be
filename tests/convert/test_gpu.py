"""Activations and logits that are read from a GPU equal the CPU's."""

from pathlib import Path

import pytest
from llama_cpp import llama_cpp

from qwen_serve.convert.calibration.prompts import PROMPTS
from qwen_serve.convert.imatrix import Imatrix, collect_imatrix
from qwen_serve.convert.kld import OWN, measure_divergence
from qwen_serve.convert.search.groups import Type
from qwen_serve.convert.search.measure import Meter
from qwen_serve.llamacpp.evaluation import Runtime

import numpy as np  # isort: skip  (after llama_cpp: see llamacpp/__init__.py)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not llama_cpp.llama_supports_gpu_offload(), reason="no GPU, or llama-cpp-python built without CUDA"
    ),
]
CPU, GPU = Runtime(threads=1, n_gpu_layers=0), Runtime(threads=1, n_gpu_layers=-1)


def test_the_importance_matrix_is_that_of_the_cpu(nano_f16: Path, tmp_path: Path) -> None:
    collected = []
    for name, runtime in (("cpu.gguf", CPU), ("gpu.gguf", GPU)):
        collect_imatrix(nano_f16, tmp_path / name, text=PROMPTS, runtime=runtime)
        collected.append(Imatrix.load(tmp_path / name).entries)
    on_cpu, on_gpu = collected
    assert on_cpu.keys() == on_gpu.keys()
    for name, entry in on_cpu.items():
        means = entry.means
        apart = np.abs(on_gpu[name].means - means).max() / means.mean()
        assert apart < 0.05, f"{name}: {apart:.3f} of the mean"


def test_the_divergence_is_that_of_the_cpu(nano_f16: Path, nano_q4_k_m: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(PROMPTS.read_text(encoding="utf-8") * 6, encoding="utf-8")  # it wants 32k tokens
    on_cpu, on_gpu = (
        measure_divergence(nano_f16, nano_q4_k_m, texts={OWN: text}, runtime=runtime)[OWN]
        for runtime in (CPU, GPU)
    )
    assert on_gpu.tokens == on_cpu.tokens
    assert on_gpu.mean == pytest.approx(on_cpu.mean, rel=0.1)


def test_probes_are_those_of_the_cpu(nano_f16: Path) -> None:
    """Tensors rounded on the card, the embedding there and in the CPU's memory; then put back for another."""
    types = dict.fromkeys(("token_embd.weight", "blk.0.ssm_out.weight"), Type.Q3_K)
    draft = {"blk.8.nextn.eh_proj.weight": Type.Q3_K}
    readings = []
    for runtime in (CPU, GPU):
        with Meter(nano_f16, PROMPTS, None, runtime) as meter:
            both = meter.measure(types | draft, mtp=draft)
            readings.append([both.mean, both.draft, meter.measure({"blk.7.ffn_up.weight": Type.Q3_K}).mean])
    on_cpu, on_gpu = readings
    assert on_gpu == pytest.approx(on_cpu, rel=0.1)
