"""FP16 copies of weights: what they take, where they are kept, and what is said where they can not be."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

from qwen_serve.llamacpp import HAS_F16_COPIES, Model
from qwen_serve.llamacpp.gguf import Header, TensorInfo, read_header
from qwen_serve.server.engine import DoesNotFit, EngineSettings, MemoryPlan, ModelLoadError
from qwen_serve.server.engine.loading import build_engine, resolve_settings
from qwen_serve.server.engine.planning.fit import plan_memory
from qwen_serve.server.engine.planning.spec import ModelSpec, Part
from qwen_serve.server.engine.profile import StartProfile, StepProfile
from tests.server.engine.helpers import settings
from tests.server.engine.planning.cards import FILE, FOUR_B, GIB, LAYERS, PLAN, STATUS, pretend_copies

F32, F16, Q4_K = 0, 1, 12

LAYER, HEAD = 2 * 2560 * 9216, 2 * 2560 * 248_320
"""Bytes of the copies in a layer and of the head's."""


def header(quantized: int = Q4_K, **more: TensorInfo) -> Header:
    """The 4B's, with a matrix in each layer and an embedding that is the head, of that type; beside them
    matrices one behind the other, as of experts, and what is never quantized."""
    tensors = [
        TensorInfo("token_embd.weight", (2560, 248_320), quantized),
        *(TensorInfo(name, (2560, 9216), quantized) for name in LAYERS),
        TensorInfo("blk.3.stacked.weight", (256, 16, 8), quantized),
        TensorInfo("blk.3.ssm_a", (128, 128), F32),
        TensorInfo("output_norm.weight", (2560,), F32),
        *more.values(),
    ]
    return Header(FILE, STATUS, FOUR_B, {tensor.name: tensor for tensor in tensors})


@pytest.fixture
def hopper(card: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that there is a GPU that copies pay on, with so many bytes free."""

    def pretend(free: int) -> None:
        card(free)
        pretend_copies(monkeypatch, pay=True)

    return pretend


def planned(found: Header | None = None, **changes: Any) -> MemoryPlan:
    wanted = {"threads": 1, "threads_batch": 1, "speculation": "off", **changes}
    return plan_memory(EngineSettings(model=FILE, **wanted), found or header())


@pytest.mark.parametrize("own_cells", [False, True])
@pytest.mark.parametrize("speculation", ["off", "mtp"])
def test_where_there_is_room_all_matrices_have_copies(
    hopper: Any, monkeypatch: pytest.MonkeyPatch, speculation: str, own_cells: bool
) -> None:
    hopper(79 * GIB)
    monkeypatch.setattr(f"{PLAN}.READS_OWN_CELLS", own_cells)  # the prefix cache grows
    plan = planned(speculation=speculation)
    gpu, host = plan.usages
    assert plan.settings.f16_copies == "on"
    assert gpu.copies == (33 if speculation == "mtp" else 32) * LAYER + HEAD
    assert host.copies == 0
    assert "FP16 copies of weights" in str(plan)
    without = planned(speculation=speculation, f16_copies="off")
    assert without.copies == 0
    assert plan.settings == without.settings.replace(f16_copies="on"), "nothing else makes room for them"
    assert gpu.total - gpu.copies == without.usages[0].total


def test_a_head_of_its_own_has_a_copy_and_the_embedding_none(hopper: Any) -> None:
    hopper(79 * GIB)
    apart = header(head=TensorInfo("output.weight", (2560, 248_320), Q4_K))
    assert planned(apart).copies == planned().copies == 32 * LAYER + HEAD


def test_what_is_not_quantized_needs_none(hopper: Any) -> None:
    hopper(79 * GIB)
    plan = planned(header(quantized=F16))
    assert (plan.settings.f16_copies, plan.copies) == ("off", 0)


def test_layers_on_the_host_have_none(hopper: Any) -> None:
    hopper(79 * GIB)
    # of 11 one is the head and one the MTP block, which is not loaded
    assert planned(n_gpu_layers=11).copies == 9 * LAYER + HEAD
    assert planned(n_gpu_layers=0).settings.f16_copies == "off"


def test_they_are_the_first_to_go(hopper: Any) -> None:
    hopper(79 * GIB)
    roomy = planned()
    need = roomy.usages[0].total + 24 * GIB // 64  # with the margin
    hopper(need)
    assert planned(f16_copies="auto").settings == roomy.settings
    hopper(need - 1)
    assert planned().settings == roomy.settings.replace(f16_copies="off")


def test_asked_for_they_make_others_smaller(hopper: Any) -> None:
    hopper(9 * GIB)
    usual = planned()
    assert usual.settings.f16_copies == "off"
    plan = planned(f16_copies="on")
    assert plan.copies == 32 * LAYER + HEAD
    assert plan.settings.ctx_size < usual.settings.ctx_size
    assert plan.fits


def test_asked_for_without_room_is_refused(hopper: Any) -> None:
    hopper(4 * GIB)
    small: dict[str, Any] = {"ctx_size": 4096, "parallel": 1}
    assert planned(**small).fits
    with pytest.raises(DoesNotFit, match=r"What would help: .*f16_copies=off"):
        planned(f16_copies="on", **small)


@pytest.mark.parametrize(
    ("there", "wrong"),
    [
        ({"pay": True, "build": False}, r"f16_copies is 'on', .* without the patch f16-copies; .*make setup"),
        ({"pay": False}, r"f16_copies is 'on', .* not faster with them on NVIDIA A10G"),
    ],
)
def test_asked_for_where_they_can_not_be_is_refused(
    hopper: Any, monkeypatch: pytest.MonkeyPatch, there: dict[str, bool], wrong: str
) -> None:
    hopper(79 * GIB)
    pretend_copies(monkeypatch, **there)
    with pytest.raises(ModelLoadError, match=wrong):
        planned(f16_copies="on")
    assert planned().settings.f16_copies == "off"


def test_they_are_a_file_s_quantized_matrices(nano_q4_k_m: Path, nano_f16: Path) -> None:
    spec = ModelSpec.from_header(read_header(nano_q4_k_m))
    elements = {
        tensor.name: int(tensor.n_elements)
        for tensor in GGUFReader(nano_q4_k_m).tensors
        if tensor.tensor_type.name not in ("F32", "F16", "BF16") and len(tensor.shape) == 2
    }
    if "output.weight" in elements:
        elements.pop("token_embd.weight", None)
    assert len(elements) > 10
    assert sum(part.copies for part in parts(spec)) == 2 * sum(elements.values())
    bare = ModelSpec.from_header(read_header(nano_f16))
    assert not any(part.copies for part in parts(bare))


def parts(spec: ModelSpec) -> list[Part]:
    return [*spec.layers, spec.head, spec.mtp]


@pytest.mark.skipif(not HAS_F16_COPIES, reason="a llama.cpp without the patch")
def test_the_host_keeps_none(nano_q4_k_m: Path) -> None:
    model = Model(nano_q4_k_m, n_gpu_layers=0, f16_copies=True)
    assert model.f16_copies == 0
    model.close()


COPY, REPACK = "llama_model_keep_f16_copies", "llama_model_repack_weights"


@pytest.mark.parametrize(
    ("copies", "repack", "done"),
    [
        ("off", "on", [REPACK]),
        ("off", "off", []),
        ("on", "on", [COPY, REPACK]),
        ("on", "off", [COPY]),
    ],
)
def test_matrices_are_repacked_behind_their_copies(
    nano_q4_k_m: Path, monkeypatch: pytest.MonkeyPatch, copies: str, repack: str, done: list[str]
) -> None:
    seen: list[str] = []

    def changed(model: Model, function: str) -> int:
        seen.append(function)
        return 7

    monkeypatch.setattr(Model, "_changed", changed)
    wanted = resolve_settings(settings(nano_q4_k_m, speculation="off", repack=repack))
    plan = plan_memory(wanted, read_header(nano_q4_k_m))
    plan = replace(plan, settings=plan.settings.replace(f16_copies=copies))
    parts = build_engine(plan, StepProfile(), StartProfile())
    assert parts.model.repacked == (7 if repack == "on" else 0)
    assert seen == done
    parts.close()


@pytest.mark.parametrize("copies", ["auto", "off"])
def test_they_are_repacked_where_that_is_known_to_be_faster(
    hopper: Any, monkeypatch: pytest.MonkeyPatch, copies: str
) -> None:
    hopper(79 * GIB)
    assert planned(f16_copies=copies).settings.repack == "on"
    assert planned(f16_copies=copies, repack="off").settings.repack == "off"
    assert planned(f16_copies=copies, deterministic=True).settings.repack == "on"
    assert planned(f16_copies=copies, deterministic=True, repack="off").settings.repack == "off"
    assert planned(f16_copies=copies, n_gpu_layers=0).settings.repack == "off"
    pretend_copies(monkeypatch, pay=False)
    assert planned(f16_copies=copies).settings.repack == "off"
    assert planned(f16_copies=copies, repack="on").settings.repack == "on"


def test_a_server_without_memory_for_them_starts_and_says_so(
    nano_q4_k_m: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = resolve_settings(settings(nano_q4_k_m, speculation="off"))
    plan = plan_memory(wanted, read_header(nano_q4_k_m))
    repacked = replace(plan, settings=plan.settings.replace(repack="on"))
    short = replace(plan, usages=tuple(replace(usage, copies=3 * GIB) for usage in plan.usages))
    with caplog.at_level(logging.WARNING):
        build_engine(plan, StepProfile(), StartProfile()).close()
        assert "copies" not in caplog.text
        assert "reordered" not in caplog.text
        build_engine(repacked, StepProfile(), StartProfile()).close()
        assert "no matrix was reordered" in caplog.text
        build_engine(short, StepProfile(), StartProfile()).close()
    assert "FP16 copies of weights got 0 bytes of the 3.0 GiB" in caplog.text
