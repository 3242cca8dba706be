"""The converted nano answers as transformers does (golden log-probabilities: tests/reference/golden.py)."""

from pathlib import Path

import numpy as np
import pytest

from tests.logits import gguf_log_probabilities, mean_kl_divergence
from tests.marks import slow_but

GOLDEN = Path(__file__).parents[1] / "reference" / "golden.npz"


@pytest.mark.parametrize(
    ("fixture", "bound", "every"),
    slow_but([("nano_f32", 1e-5, 4)], [("nano_f32", 1e-5, 4), ("nano_f32", 1e-5, 1), ("nano_f16", 1e-4, 1)]),
)
def test_logits_equal_those_of_transformers(
    fixture: str, bound: float, every: int, request: pytest.FixtureRequest
) -> None:
    gguf: Path = request.getfixturevalue(fixture)
    golden = np.load(GOLDEN)
    sequences, positions = golden["sequences"], golden["positions"]
    assert sequences.shape == (64, 256)
    ours = gguf_log_probabilities(gguf, sequences[::every], positions)
    theirs = golden["log_probabilities"][::every].astype(np.float32)
    assert mean_kl_divergence(theirs, ours) < bound
