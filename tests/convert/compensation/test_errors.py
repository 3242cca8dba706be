"""What is left of each matrix's error, by kind of text."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from qwen_serve.convert.compensation import errors
from qwen_serve.convert.compensation.errors import Errors, measure_errors
from qwen_serve.convert.compensation.file import rounded_tensors
from qwen_serve.llamacpp.evaluation import Runtime

RUNTIME = Runtime(threads=1, n_gpu_layers=0)
PROMPTS = Path(__file__).parents[3] / "qwen_serve" / "convert" / "calibration" / "prompts.toml"


def test_a_file_by_nearest_has_the_errors_of_nearest_until_it_is_changed(
    nano_f16: Path, nano_q2_k: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "CHUNKS", 1)
    imatrix, file = nano_q2_k.with_name("nano.imatrix.gguf"), Path(shutil.copy(nano_q2_k, tmp_path))
    changed = "blk.3.ffn_down.weight"
    tensor = rounded_tensors(file)[changed]
    with file.open("r+b") as out:
        out.seek(tensor.offset)
        out.write(bytes(tensor.n_bytes))
    texts = {"own": [PROMPTS], "unlike": [Path(__file__), PROMPTS]}
    found = measure_errors(nano_f16, file, texts=texts, imatrix=imatrix, runtime=RUNTIME)
    assert set(found) == set(rounded_tensors(file))
    for name, kinds in found.items():
        assert list(kinds) == list(texts)
        for one in kinds.values():
            assert 0 < one.nearest < 1
            if name == changed:
                assert one.compensated == pytest.approx(1), "all weights are 0, so the error is the product"
            else:
                assert one.compensated == pytest.approx(one.nearest, rel=1e-3)
    assert found[changed]["own"].nearest != found[changed]["unlike"].nearest


def test_all_of_a_product_is_compared(
    nano_f16: Path, nano_q2_k: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling rows changes the errors little."""
    monkeypatch.setattr(errors, "CHUNKS", 1)
    found: list[dict[str, dict[str, Errors]]] = []
    for elements in (1 << 18, 1 << 15):
        monkeypatch.setattr(errors, "SAMPLE_ELEMENTS", elements)
        found.append(
            measure_errors(nano_f16, nano_q2_k, texts={"own": [PROMPTS]}, imatrix=None, runtime=RUNTIME)
        )
    ratios = [found[1][name]["own"].compensated / found[0][name]["own"].compensated for name in found[0]]
    assert np.quantile(ratios, [0.1, 0.9]) == pytest.approx(1, rel=0.35)
