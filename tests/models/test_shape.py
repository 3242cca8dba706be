"""Shapes: given on the command line, written to config.json and read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")

from models.nano.train.__main__ import parser
from models.nano.train.shape import Shape, VisionShape, model_config, shape_of

NANO = Path(__file__).parents[2] / "models" / "nano"


def test_the_default_is_the_bundled_checkpoints_shape() -> None:
    assert shape_of(json.loads((NANO / "config.json").read_text(encoding="utf-8"))) == Shape()


def test_another_shape_is_written_and_read_back() -> None:
    asked = "hidden=512,layers=4,full_attention_interval=2,ffn=1024,heads=8,linear_value_heads=8"
    shape = parser().parse_args(["fit", "--out", "x", "--shape", asked]).shape
    assert (shape.hidden, shape.layers, shape.heads, shape.kv_heads) == (512, 4, 8, 2)
    ids = {
        token["content"]: token["id"]
        for token in json.loads((NANO / "tokenizer.json").read_bytes())["added_tokens"]
    }
    config = json.loads(json.dumps(model_config(shape, VisionShape(), ids)))
    assert config["text_config"]["layer_types"] == ["linear_attention", "full_attention"] * 2
    assert shape_of(config) == shape


@pytest.mark.parametrize(
    "text", ["", "hidden", "hidden=", "hidden=0", "hidden=-1", "layer=4", "norm_eps=1", "hidden=512;ffn=2"]
)
def test_a_size_that_there_is_not_is_refused_by_name(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["fit", "--out", "x", "--shape", text])
    assert "want SIZE=NUMBER, of vocab_size, hidden, layers" in capsys.readouterr().err
