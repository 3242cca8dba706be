"""The converted nano answers as transformers does (golden log-probabilities: tests/reference/golden.py)."""

from pathlib import Path

import numpy as np
import pytest

from tests.logits import gguf_log_probabilities, mean_kl_divergence

GOLDEN = Path(__file__).parents[1] / "reference" / "golden.npz"


@pytest.mark.parametrize(
    ("fixture", "bound"), [("nano_f32", 1e-5), pytest.param("nano_f16", 1e-4, marks=pytest.mark.slow)]
)
def test_logits_equal_those_of_transformers(
    fixture: str, bound: float, request: pytest.FixtureRequest
) -> None:
    gguf: Path = request.getfixturevalue(fixture)
    golden = np.load(GOLDEN)
    sequences, positions = golden["sequences"], golden["positions"]
    assert sequences.shape == (64, 256)
    ours = gguf_log_probabilities(gguf, sequences, positions)
    assert mean_kl_divergence(golden["log_probabilities"].astype(np.float32), ours) < bound
