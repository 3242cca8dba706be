"""Every position of the golden sequences: the GGUF against transformers, the golden file against both."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.logits import gguf_log_probabilities, mean_kl_divergence
from tests.reference.golden import GOLDEN, KEPT, LENGTH, load_reference, log_probabilities

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def golden() -> Any:
    return np.load(GOLDEN)


@pytest.fixture(scope="module")
def reference(golden: Any) -> NDArray[np.float32]:
    return log_probabilities(load_reference(), golden["sequences"])


def test_the_golden_file_is_what_transformers_says(golden: Any, reference: NDArray[np.float32]) -> None:
    kept = golden["log_probabilities"].astype(np.float32)
    assert mean_kl_divergence(reference[:, KEPT], kept) < 1e-6


@pytest.mark.parametrize(("fixture", "bound"), [("nano_f32", 1e-5), ("nano_f16", 1e-4)])
def test_all_logits_equal_those_of_transformers(
    fixture: str, bound: float, golden: Any, reference: NDArray[np.float32], request: pytest.FixtureRequest
) -> None:
    gguf: Path = request.getfixturevalue(fixture)
    ours = gguf_log_probabilities(gguf, golden["sequences"], np.arange(LENGTH))
    assert mean_kl_divergence(reference, ours) < bound
