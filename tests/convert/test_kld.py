"""KL divergence between two GGUFs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from convert import kld
from convert.chunks import read_chunks
from convert.errors import ConvertError
from convert.kld import measure_divergence
from convert.llama import Model, Runtime
from convert.quantize import quantize
from convert.recipes import load_recipe
from tests.logits import gguf_log_probabilities, mean_kl_divergence

import numpy as np  # isort: skip

if TYPE_CHECKING:
    from pathlib import Path

RUNTIME = Runtime(threads=1, n_gpu_layers=0)
CHUNKS = 3


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(f"{n} and {n + 1} make {2 * n + 1}." for n in range(160)))
    return path


@pytest.fixture(autouse=True)
def _few_tokens_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kld, "MIN_TOKENS", CHUNKS * 512)


@pytest.fixture(scope="module")
def expected(nano_f16: Path, nano_q2_k: Path, text: Path) -> float:
    """From log-probabilities computed a sequence at a time, kept, and compared in double precision."""
    with Model(nano_f16, RUNTIME) as model:
        chunks = read_chunks(model, text)
    positions = np.arange(chunks.shape[1])
    p, q = (gguf_log_probabilities(path, chunks, positions) for path in (nano_f16, nano_q2_k))
    return mean_kl_divergence(p, q)


def test_of_a_file_with_itself_is_zero(nano_f16: Path, text: Path) -> None:
    divergence = measure_divergence(nano_f16, nano_f16, text=text, runtime=RUNTIME)
    assert divergence.tokens >= CHUNKS * 512
    assert (divergence.mean, divergence.maximum, divergence.same_top) == (0.0, 0.0, 1.0)


def test_fewer_bits_are_further_away(nano_f16: Path, text: Path, tmp_path: Path) -> None:
    means = []
    for level in ("Q8_0", "Q4_K_S", "Q2_K"):
        out = tmp_path / f"{level}.gguf"
        quantize(nano_f16, out, recipe=load_recipe(level), imatrix=None, runtime=RUNTIME)
        means.append(measure_divergence(nano_f16, out, text=text, runtime=RUNTIME).mean)
    assert 0 < means[0] < means[1] < means[2]


@pytest.mark.parametrize("batch", [128, 512, 1024], ids=["parts of a chunk", "a chunk", "two chunks"])
def test_no_batching_changes_it(
    nano_f16: Path,
    nano_q2_k: Path,
    text: Path,
    expected: float,
    batch: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kld, "MAX_BATCH", batch)
    measured = measure_divergence(nano_f16, nano_q2_k, text=text, runtime=RUNTIME)
    assert measured.mean == pytest.approx(expected, rel=0.02)


def test_memory_is_bounded_by_the_batch_and_not_by_the_text() -> None:
    rows = kld.LOGIT_BYTES // (4 * 248_320)
    assert 200 < rows < kld.MAX_BATCH


def test_a_text_too_short_is_refused(nano_f16: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kld, "MIN_TOKENS", 10**6)
    with pytest.raises(ConvertError, match=r"text\.txt: \d+ tokens in whole chunks; 1000000 are needed"):
        measure_divergence(nano_f16, nano_f16, text=text, runtime=RUNTIME)
