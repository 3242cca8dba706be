"""Compensated rounding has less loss than rounding each weight by itself, and less with every sweep."""

import pytest
from gguf import GGMLQuantizationType as Type

from qwen_serve.convert.compensation.grids import GRIDS
from qwen_serve.convert.compensation.packing import pack
from qwen_serve.convert.compensation.rounding import Inputs, round_compensated
from qwen_serve.convert.compensation.scales import search_blocks
from qwen_serve.llamacpp.weights import dequantize_rows
from tests.marks import slow_but

import numpy as np  # isort: skip

WIDTH, ROWS = 512, 48


def correlated(width: int = WIDTH) -> np.ndarray:
    """The Gram matrix of strongly correlated inputs."""
    rng = np.random.default_rng(4)
    mixed = rng.standard_normal((2048, width)) @ rng.standard_normal((width, width)) / width**0.5
    rows = rng.standard_normal((2048, 8)) @ rng.standard_normal((8, width)) + mixed
    return (rows.T @ rows).astype(np.float32)


def weights(width: int = WIDTH) -> np.ndarray:
    return np.random.default_rng(5).standard_normal((width, ROWS)).astype(np.float32)


def loss(found: np.ndarray, wanted: np.ndarray, gram: np.ndarray) -> float:
    off = (found - wanted).astype(np.float64)
    return float((off * (gram @ off)).sum())


@pytest.mark.parametrize("kind", slow_but([Type.Q4_K, Type.IQ4_XS], GRIDS), ids=lambda kind: kind.name)
def test_the_loss_is_well_below_that_of_the_nearest(kind: Type) -> None:
    gram, wanted, grid = correlated(), weights(), GRIDS[kind]
    nearest = search_blocks(wanted, gram.diagonal() / gram.diagonal().mean(), grid)
    blocks = round_compensated(wanted, Inputs(gram), grid)
    assert loss(blocks.values(), wanted, gram) < 0.6 * loss(nearest.values(), wanted, gram)
    # and what was computed is what the bytes say
    np.testing.assert_array_equal(dequantize_rows(pack(kind, blocks), kind), blocks.values().T)


@pytest.mark.parametrize(
    "kind", slow_but([Type.Q2_K], [Type.Q2_K, Type.Q6_K, Type.IQ4_XS]), ids=lambda kind: kind.name
)
def test_a_sweep_never_adds_to_the_loss(kind: Type) -> None:
    wanted, inputs = weights(), Inputs(correlated())
    losses = [
        loss(round_compensated(wanted, inputs, GRIDS[kind], sweeps=n).values(), wanted, inputs.gram)
        for n in range(4)
    ]
    assert losses == sorted(losses, reverse=True)
    assert losses[3] < losses[0]


def test_rows_are_rounded_alike_alone_and_together() -> None:
    wanted, inputs = weights(), Inputs(correlated())
    whole = round_compensated(wanted, inputs, GRIDS[Type.Q3_K]).values()
    part = round_compensated(np.ascontiguousarray(wanted[:, :16]), inputs, GRIDS[Type.Q3_K]).values()
    # sums in another order may turn a tie
    assert np.mean(np.isclose(part, whole[:, :16], rtol=1e-3, atol=1e-6)) > 0.95


def test_inputs_that_were_all_zero_leave_the_nearest() -> None:
    wanted = weights()
    blocks = round_compensated(wanted, Inputs(np.zeros((WIDTH, WIDTH), np.float32)), GRIDS[Type.Q4_K])
    nearest = search_blocks(wanted, np.ones(WIDTH, np.float32), GRIDS[Type.Q4_K])
    off, least = (np.square(found.values() - wanted).sum() for found in (blocks, nearest))
    assert off <= least * (1 + 1e-6)


def test_a_row_need_not_be_whole_super_blocks() -> None:
    gram, wanted = correlated(352), weights(352)
    blocks = round_compensated(wanted, Inputs(gram), GRIDS[Type.Q8_0])
    np.testing.assert_array_equal(dequantize_rows(pack(Type.Q8_0, blocks), Type.Q8_0), blocks.values().T)
    nearest = search_blocks(wanted, gram.diagonal() / gram.diagonal().mean(), GRIDS[Type.Q8_0])
    assert loss(blocks.values(), wanted, gram) < loss(nearest.values(), wanted, gram)
