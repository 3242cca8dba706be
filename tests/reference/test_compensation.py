"""Compensated rounding with torch, as on a GPU, gives numpy's blocks except for ties."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from qwen_serve.convert.compensation.gram import Grams
from qwen_serve.convert.compensation.grids import GRIDS
from qwen_serve.convert.compensation.packing import pack
from qwen_serve.convert.compensation.rounding import Inputs, round_compensated
from qwen_serve.convert.errors import ConvertError
from qwen_serve.llamacpp.weights import dequantize_rows

torch = pytest.importorskip("torch", reason="the extra `torch`")
pytestmark = pytest.mark.reference

WIDTH, ROWS = 512, 64


@pytest.mark.parametrize("kind", GRIDS, ids=lambda kind: kind.name)
def test_torch_rounds_as_numpy_does(kind: Type) -> None:
    rng = np.random.default_rng(2)
    rows = rng.standard_normal((4 * WIDTH, WIDTH)) @ rng.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5
    values = rng.standard_normal((WIDTH, ROWS)).astype(np.float32)
    values[:32] = 0  # steps of 0
    found, losses = [], []
    for bring in (np.array, torch.tensor):
        inputs = bring(rows.astype(np.float32))
        blocks = round_compensated(bring(values), Inputs(inputs.T @ inputs), GRIDS[kind])
        found.append(dequantize_rows(pack(kind, blocks), kind))
        np.testing.assert_array_equal(found[-1], np.asarray(blocks.values()).T)
        losses.append(float(np.square((found[-1] - values.T) @ rows.T).sum()))
    # sums in another order may turn a tie, and with it the columns after it
    assert np.mean(np.isclose(found[0], found[1], rtol=1e-3, atol=1e-6)) > 0.9
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


def test_torch_sums_what_numpy_sums() -> None:
    rows = np.random.default_rng(4).standard_normal((3, 40, 8)).astype(np.float32)
    found = []
    for bring in (np.array, torch.tensor):
        grams = Grams({"w", "v"}, None, bring)
        for part in rows:
            grams.add("w", part)
        found.append(np.asarray(grams.take("w", 0, 8).gram))
        grams.add("v", np.full((1, 8), np.inf, np.float32))
        with pytest.raises(ConvertError, match="inputs of v are not finite"):
            grams.take("v", 0, 8)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-6)
