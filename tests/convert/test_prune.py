"""Dropping layers: only whole groups, never all layers, and the resulting file names."""

import re

import pytest

from qwen_serve.convert.config import ModelConfig
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.prune import kept_layers, label
from tests.checkpoints import model_config

CONFIG = ModelConfig.from_json(model_config(layers=12))


@pytest.mark.parametrize(
    ("dropped", "kept"),
    [
        ((), tuple(range(12))),
        ((4, 5, 6, 7), (0, 1, 2, 3, 8, 9, 10, 11)),
        ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7)),
    ],
)
def test_whole_groups_go(dropped: tuple[int, ...], kept: tuple[int, ...]) -> None:
    assert kept_layers(CONFIG, dropped) == kept


@pytest.mark.parametrize(
    ("dropped", "message"),
    [
        ((4, 5, 6), "[4, 5, 6] is part of a group; layers go in whole groups of 4, here 4 to 7"),
        ((3, 4, 5, 6), "[3] is part of a group"),
        ((12,), "[12] are not among this model's 12 (0 to 11)"),
        (tuple(range(12)), "all 12 are named; at least one group of 4 must stay"),
    ],
)
def test_anything_else_is_refused(dropped: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConvertError, match=re.escape(message)):
        kept_layers(CONFIG, dropped)


@pytest.mark.parametrize(
    ("dropped", "name"),
    [((), ""), ((4, 5, 6, 7), "drop4-7"), ((8, 9, 10, 11, 0, 1, 2, 3), "drop0-3_8-11"), ((5,), "drop5")],
)
def test_labels(dropped: tuple[int, ...], name: str) -> None:
    assert label(dropped) == name
