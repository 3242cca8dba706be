"""The devices that layers go to."""

from typing import Any

import pytest

from qwen_serve.server.engine import ModelLoadError
from tests.server.engine.planning.cards import GIB, four_b_plan


@pytest.mark.parametrize("changes", [{"main_gpu": 1}, {"split_mode": "layer"}])
def test_a_choice_among_gpus_is_refused_where_none_is_used(card: Any, changes: dict[str, Any]) -> None:
    card()
    with pytest.raises(ModelLoadError, match=f"{next(iter(changes))} is .*, but .* GPU.*leave"):
        four_b_plan(**changes)
    card(23 * GIB, 23 * GIB)
    with pytest.raises(ModelLoadError, match="but n_gpu_layers is 0"):
        four_b_plan(n_gpu_layers=0, **changes)
    assert four_b_plan(**changes).fits


def test_layers_for_a_gpu_that_is_not_there_are_reported(card: Any, caplog: pytest.LogCaptureFixture) -> None:
    card()
    four_b_plan(speculation="off", n_gpu_layers=0)
    four_b_plan(speculation="off", n_gpu_layers=-1)
    assert "n_gpu_layers" not in caplog.text
    four_b_plan(speculation="off", n_gpu_layers=99)
    assert "n_gpu_layers is 99, but" in caplog.text
