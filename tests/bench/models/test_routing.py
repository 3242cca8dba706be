"""The synthetic router: how often experts are chosen falls with their rank, by the exponent."""

import numpy as np
import numpy.typing as npt
import pytest

from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.models.routing import zipf_scales
from qwen_serve.bench.models.shapes import SHAPES
from qwen_serve.bench.models.synthetic import Synthetic


def shares(scales: npt.NDArray[np.float32], used: int, tokens: int = 4096) -> npt.NDArray[np.float64]:
    """The share of tokens that choose each expert, from logits of random rows."""
    logits = np.random.default_rng(0).standard_normal((tokens, len(scales))) * scales
    chosen = np.argpartition(logits, -used)[:, -used:]
    counts: npt.NDArray[np.float64] = np.bincount(chosen.ravel(), minlength=len(scales)) / tokens
    return counts


@pytest.mark.parametrize("exponent", [0.5, 1.0])
def test_experts_are_chosen_by_their_rank(exponent: float) -> None:
    found = shares(zipf_scales(256, 8, exponent), 8)
    wanted = np.arange(1.0, 257) ** -exponent
    for first, last in ((8, 16), (16, 64), (64, 256)):  # those before are at MOST
        ratio = found[first:last].sum() / found[8:].sum()
        assert ratio == pytest.approx(wanted[first:last].sum() / wanted[8:].sum(), rel=0.25)
    assert found[0] > 3 * found[64:].mean()


def test_each_layer_prefers_other_experts() -> None:
    made = Synthetic.make(SHAPES["small-moe"], mtp_acceptance=0.6, seed=0, routing_zipf=1.0)
    names = ("blk.0.ffn_gate_inp.weight", "blk.1.ffn_gate_inp.weight")
    sources = {tensor.name: tensor.stored for tensor in made.weights.plan().tensors}
    routers = [sources[name].read(0, 8 * 256).reshape(8, 256) for name in names]
    norms = [np.linalg.norm(rows, axis=1) for rows in routers]
    scales = zipf_scales(8, 2, 1.0)
    for found in norms:
        assert np.sort(found) == pytest.approx(np.sort(scales), rel=0.2)
    assert norms[0].argsort().tolist() != norms[1].argsort().tolist()


def test_without_an_exponent_all_rows_are_alike() -> None:
    assert np.ptp(zipf_scales(256, 8, 0.0)) < 1e-6


@pytest.mark.parametrize("wrong", [(256, 8, -1.0), (256, 8, 5.0), (4, 2, 1.0)])
def test_what_cannot_be_is_refused(wrong: tuple[int, int, float]) -> None:
    with pytest.raises(BenchError, match="--routing-zipf"):
        zipf_scales(*wrong)
