"""The specification of a model, from its metadata and tensors."""

from pathlib import Path

import pytest

from qwen_serve.llamacpp.gguf import Header
from qwen_serve.server.engine import EngineSettings, ModelLoadError
from qwen_serve.server.engine.planning.spec import ModelSpec
from tests.server.engine.planning.cards import FILE, FOUR_B, MIB, STATUS, four_b


def test_the_spec_of_the_4b() -> None:
    spec = ModelSpec.from_header(four_b())
    assert spec.n_embd == 2560
    assert spec.state == pytest.approx(50.5e6, rel=0.05)  # design fact: about 50 MB a sequence
    assert spec.cell(EngineSettings(model=Path("4b.gguf"))) == 32 * 1024
    assert spec.mtp.weights == 70 * MIB
    assert [layer.kv[0] > 0 for layer in spec.layers] == [False, False, False, True] * 8


def test_missing_metadata_is_named() -> None:
    incomplete = {key: value for key, value in FOUR_B.items() if "context_length" not in key}
    with pytest.raises(ModelLoadError, match=r"qwen35\.context_length"):
        ModelSpec.from_header(Header(FILE, STATUS, incomplete, {}))
