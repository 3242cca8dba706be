"""The whole way from checkpoint to answers: GGUFs of the bundled model, served over HTTP, on held-out items.

The yardstick is what the reference implementation answered to the same items in full precision
(models/nano/reference.json), so a difference is the conversion's, the quantization's or the server's.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from qwen_serve.bench.cli import main
from qwen_serve.bench.gates.estimate import Paired
from qwen_serve.bench.gates.gate import NANO_FOLDER
from qwen_serve.bench.gates.quality import SAMPLES
from qwen_serve.bench.gates.samples import Sample, read_samples
from qwen_serve.bench.store import load
from tests.server.serving import ServerProcess

pytestmark = pytest.mark.slow

# of 300 items a family
SHARE = 0.2
# what two bits lose: constraints that are forgotten, and steps of thoughts
TWO_BITS = "nano_instructions,nano_reasoning"
TWO_BITS_SHARE = 0.4

Answers = dict[tuple[str, str], Sample]


def answers(gguf: Path, folder: Path, *, gates: str = "nano", share: float = SHARE) -> Answers:
    """The gates' samples, by gate and item, from our server with this model."""
    out = folder / gguf.stem
    with ServerProcess("--model", gguf) as server:
        argv = ["--url", server.wait_ready(), "--tasks", gates, "--limit", str(share), "--out", str(out)]
        assert main(["quality", *argv]) == 0, server.log
    (run,) = load([out]).manifests
    return {(sample.gate, sample.id): sample for sample in read_samples(out / run / SAMPLES)}


@pytest.fixture(scope="module")
def f16(nano_f16: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return answers(nano_f16, tmp_path_factory.mktemp("f16"))


@pytest.fixture(scope="module")
def q4_k_m(nano_q4_k_m: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return answers(nano_q4_k_m, tmp_path_factory.mktemp("q4_k_m"))


@pytest.fixture(scope="module")
def plain_q2_k(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """llama.cpp's own mixture, no importance matrix. quant_recipes/Q2_K.toml loses less than can be seen."""
    folder = tmp_path_factory.mktemp("q2_k")
    recipe = folder / "plain.toml"
    recipe.write_text('type = "Q2_K"\nabout = "no overrides"\n')
    what = ["--src", str(NANO_FOLDER), "--quant", "Q2_K", "--recipe", str(recipe)]
    how = ["--no-imatrix", "--no-kld", "--threads", "1", "--out", str(folder)]
    subprocess.run([sys.executable, "-m", "qwen_serve.convert", *what, *how], check=True)
    return answers(folder / "nano-Q2_K.gguf", folder, gates=TWO_BITS, share=TWO_BITS_SHARE)


def against_the_reference(found: Answers) -> Paired:
    """Item by item: what the reference implementation alone got right, and what it did not."""
    missing = [f"{sample.gate} {sample.id}" for sample in found.values() if sample.reference is None]
    assert not missing, f"not in reference.json: {missing}"
    return Paired.of((sample.outcomes, sample.reference or []) for sample in found.values())


def test_f16_answers_as_the_reference_does(f16: Answers) -> None:
    paired = against_the_reference(f16)
    assert not paired.worse and paired.lost + paired.gained <= 0.03 * len(f16), paired


def test_q4_k_m_stays_close(q4_k_m: Answers) -> None:
    paired = against_the_reference(q4_k_m)
    assert not paired.worse and paired.lost <= 0.08 * len(q4_k_m), paired


def test_two_bits_are_visibly_worse(plain_q2_k: Answers) -> None:
    paired = against_the_reference(plain_q2_k)
    assert paired.worse and paired.p_value < 0.01, paired
