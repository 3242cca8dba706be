"""`small` fits a card of 4 GB: the server's own memory plan for the shapes of Qwen3.5-4B, without weights."""

from pathlib import Path
from typing import Any

import pytest

from qwen_serve.bench.models.header import quantized_tensors, write_header
from qwen_serve.bench.models.shapes import SHAPES
from qwen_serve.convert.recipes import load_recipe
from qwen_serve.llamacpp import Device
from qwen_serve.llamacpp.gguf import read_header
from qwen_serve.server.engine import DoesNotFit, EngineSettings
from qwen_serve.server.engine.loading import resolve_settings
from qwen_serve.server.engine.planning import devices, fit, measured
from qwen_serve.server.engine.planning.fit import plan_memory
from qwen_serve.server.engine.planning.plan import MemoryPlan
from qwen_serve.server.engine.planning.spec import ModelSpec
from qwen_serve.server.settings_sources import load_variant

MIB, GIB = 1024**2, 1024**3
FREE = 3700 * MIB
"""Of 4 GiB, without what a driver and a desktop take."""


@pytest.fixture(scope="module")
def four_b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The header of the 4B with `small`'s weights."""
    path = tmp_path_factory.mktemp("header") / "4b.gguf"
    config = SHAPES["4b"]
    level = load_variant("small").level
    write_header(path, config, quantized_tensors(config, load_recipe(level)))
    return path


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of 4 GB beside the host. Compute buffers are those of llama.cpp's graphs on the CPU."""
    places = [
        Device("CUDA0", "a card of 4 GB", is_gpu=True, free=FREE, total=4 * GIB),
        Device("CPU", "a processor", is_gpu=False, free=16 * GIB, total=16 * GIB),
    ]

    def on_the_card(settings: EngineSettings, spec: ModelSpec, *_: object) -> dict[str, int]:
        return {
            "CUDA0": sum(measured.profile_run(settings.replace(n_gpu_layers=0), spec, places, None).values())
        }

    monkeypatch.setattr(devices, "devices", lambda: places)
    monkeypatch.setattr(devices, "available_memory", lambda: None)
    monkeypatch.setattr(fit, "keeps_f16_copies", lambda _: False)  # the card is no Hopper
    monkeypatch.setattr("qwen_serve.server.engine.planning.plan.profile_run", on_the_card)
    monkeypatch.setattr("qwen_serve.server.engine.planning.plan.takes_rows", lambda *_: True)


def planned(path: Path, **settings: Any) -> MemoryPlan:
    return plan_memory(resolve_settings(EngineSettings(model=path, **settings)), read_header(path))


@pytest.mark.slow
def test_small_fits_a_card_of_4_gb(four_b: Path) -> None:
    plan = planned(four_b, **load_variant("small").settings)
    assert plan.fits
    assert plan.usages[0].total < FREE
    assert plan.settings.ctx_size >= 4096, "room for a conversation"


@pytest.mark.slow
def test_other_settings_do_not(four_b: Path) -> None:
    with pytest.raises(DoesNotFit):
        planned(four_b, speculation="both")
