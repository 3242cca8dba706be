"""KL divergence between two GGUFs."""

import pytest

from qwen_serve.convert import kld
from qwen_serve.convert.chunks import read_chunks
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.kld import OWN, measure_divergence
from qwen_serve.convert.quantize import quantize
from qwen_serve.convert.recipes import load_recipe
from qwen_serve.llamacpp.evaluation import Runtime
from tests.logits import gguf_log_probabilities, mean_kl_divergence
from tests.marks import slow_but

import numpy as np  # isort: skip

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
    """The expected value, from all log-probabilities in double precision, one sequence at a time."""
    with RUNTIME.load(nano_f16) as model:
        chunks = read_chunks(model, text)
    positions = np.arange(chunks.shape[1])
    p, q = (gguf_log_probabilities(path, chunks, positions) for path in (nano_f16, nano_q2_k))
    return mean_kl_divergence(p, q)


def test_of_a_file_with_itself_is_zero(nano_f16: Path, text: Path) -> None:
    divergence = measure_divergence(nano_f16, nano_f16, texts={OWN: text}, runtime=RUNTIME)[OWN]
    assert divergence.tokens >= CHUNKS * 512
    assert (divergence.mean, divergence.maximum, divergence.same_top) == (0.0, 0.0, 1.0)


@pytest.mark.slow
def test_fewer_bits_are_further_away(nano_f16: Path, text: Path, tmp_path: Path) -> None:
    means = []
    for level in ("Q8_0", "Q4_K_S", "Q2_K"):
        out = tmp_path / f"{level}.gguf"
        quantize(nano_f16, out, recipe=load_recipe(level), imatrix=None, runtime=RUNTIME)
        means.append(measure_divergence(nano_f16, out, texts={OWN: text}, runtime=RUNTIME)[OWN].mean)
    assert 0 < means[0] < means[1] < means[2]


@pytest.mark.parametrize(
    "batch", slow_but([512], [128, 512, 1024]), ids=["parts of a chunk", "a chunk", "two chunks"]
)
def test_no_batching_changes_it(
    nano_f16: Path,
    nano_q2_k: Path,
    text: Path,
    expected: float,
    batch: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kld, "MAX_BATCH", batch)
    measured = measure_divergence(nano_f16, nano_q2_k, texts={OWN: text}, runtime=RUNTIME)[OWN]
    assert measured.mean == pytest.approx(expected, rel=0.02)


def test_memory_is_bounded_by_the_batch_and_not_by_the_text() -> None:
    rows = kld.LOGIT_BYTES // (4 * 248_320)
    assert 200 < rows < kld.MAX_BATCH


def test_a_text_too_short_is_refused(nano_f16: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kld, "MIN_TOKENS", 10**6)
    with pytest.raises(ConvertError, match=r"text\.txt: \d+ tokens in whole chunks; 1000000 are needed"):
        measure_divergence(nano_f16, nano_f16, texts={OWN: text}, runtime=RUNTIME)[OWN]


def test_over_the_tokens_that_both_have() -> None:
    """The candidate has tokens 1 and 3 of four; in the last row the reference all but rules both out."""
    with np.errstate(divide="ignore"):
        p = np.log(np.array([[0.4, 0.3, 0.2, 0.1], [0.1, 0.1, 0.2, 0.6], [0.5, 3e-70, 0.5, 1e-70]])).astype(
            "f4"
        )
        q = np.log(np.array([[0.5, 0.5], [0.2, 0.8], [0.75, 0.25]])).astype("f4")
    columns = np.array([1, 3])
    part = kld.Part(p + 7, q - 3, np.array([1, 3, -1], np.int32), np.array([0, 1, -1], np.int32), columns)
    divergence, same_top, dropped, p_loss, q_loss = part.compare(slice(None))
    expected = [
        0.75 * np.log(1.5) + 0.25 * np.log(0.5),
        sum(a * np.log(a / b) for a, b in ((1 / 7, 0.2), (6 / 7, 0.8))),
    ]
    assert divergence == pytest.approx([*expected, 0], abs=1e-6)
    assert same_top.tolist() == [False, True, False]
    assert dropped == pytest.approx([0.6, 0.3, 1])
    assert p_loss[:2] == pytest.approx([-np.log(0.3), -np.log(0.6)])
    assert q_loss[:2] == pytest.approx([-np.log(0.5), -np.log(0.8)])
    assert np.isnan([p_loss[2], q_loss[2]]).all()
