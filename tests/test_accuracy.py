"""The whole way from checkpoint to answers: GGUFs of the bundled model, served over HTTP, on held-out items.

The yardstick is what the reference implementation answered to the same items in full precision
(models/nano/reference.json), so a difference is the conversion's, the quantization's or the server's.
"""

import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from math import comb
from pathlib import Path

import pytest

from bench.cli import main
from bench.gates.estimate import Outcomes, estimate
from bench.gates.gate import NANO_FOLDER, NANO_NAMES
from bench.gates.quality import SAMPLES
from bench.gates.samples import Sample, read_samples
from bench.store import load
from tests.server.serving import ServerProcess

# of 1,200 items a family
SHARE = 0.1
# what two bits lose are steps of long thoughts, and few of them: it takes more items to be sure
THINKING_SHARE = 0.4

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
    subprocess.run([sys.executable, "-m", "convert", *what, *how], check=True)
    return answers(folder / "nano-Q2_K.gguf", folder, gates="nano_reasoning", share=THINKING_SHARE)


def recorded(sample: Sample) -> list[float]:
    """What the reference implementation's answer was worth."""
    assert sample.reference is not None, f"{sample.gate} {sample.id} is not in reference.json"
    return sample.reference


def scores(found: Answers, outcomes: Callable[[Sample], Outcomes]) -> Mapping[str, float]:
    """Each gate's score."""
    strata: dict[str, dict[str, list[Outcomes]]] = {name: defaultdict(list) for name in NANO_NAMES}
    for sample in found.values():
        strata[sample.gate][sample.task].append(outcomes(sample))
    return {name: estimate(list(of_gate.values())).score for name, of_gate in strata.items()}


def check_within(found: Answers, points: float) -> None:
    """Every gate's score differs from the reference's on the same items by no more than ``points`` of 100."""
    ours, theirs = scores(found, lambda sample: sample.outcomes), scores(found, recorded)
    far = [name for name in NANO_NAMES if abs(ours[name] - theirs[name]) > points / 100]
    assert not far, f"{far}: {dict(ours)}, reference {dict(theirs)}"


def test_f16_answers_as_well_as_the_reference(f16: Answers) -> None:
    check_within(f16, 2)


def test_q4_k_m_stays_close(q4_k_m: Answers) -> None:
    check_within(q4_k_m, 5)


def test_two_bits_are_visibly_worse(plain_q2_k: Answers) -> None:
    lost = sum(recorded(sample) > sample.outcomes for sample in plain_q2_k.values())
    gained = sum(recorded(sample) < sample.outcomes for sample in plain_q2_k.values())
    # were it as good, an item that only one of the two gets right would be either's by the same chance
    trials = lost + gained
    by_chance = sum(comb(trials, n) for n in range(lost, trials + 1)) / 2**trials
    assert by_chance < 0.01, f"{lost} items lost, {gained} gained"
