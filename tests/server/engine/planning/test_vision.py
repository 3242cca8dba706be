"""Memory of a vision tower on a simulated GPU."""

from pathlib import Path
from typing import Any

import pytest

from qwen_serve.llamacpp.gguf import Header, TensorInfo, Value
from qwen_serve.server.engine import DoesNotFit, MemoryPlan, ModelLoadError
from qwen_serve.server.engine.planning import fit
from tests.server.engine.planning.cards import GIB, MIB, STATUS, four_b_plan

TOWER: dict[str, Value] = {
    "general.architecture": "clip",
    "clip.projector_type": "qwen3vl_merger",
    "clip.vision.projection_dim": 2560,
    "clip.vision.embedding_length": 1024,
    "clip.vision.feed_forward_length": 4096,
    "clip.vision.patch_size": 16,
    "clip.vision.attention.head_count": 16,
}
"""Qwen3.5-4B's."""


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, card: Any) -> Any:
    """The plan of a 4B with a tower of these keys beside it, on a card of 23 GiB."""
    card(23 * GIB)

    def plan(keys: dict[str, Value], **changes: Any) -> MemoryPlan:
        tensors = {"v.blk.0.attn_qkv.weight": TensorInfo("v.blk.0.attn_qkv.weight", (25 * MIB,), 0)}
        path = Path("mmproj-4b-F16.gguf")
        header = Header(path, STATUS, TOWER | keys, tensors, "mmproj")
        monkeypatch.setattr(fit, "read_header", lambda *_: header)
        monkeypatch.setattr(fit, "check_tower", lambda _: None)  # it has one tensor
        return four_b_plan(mmproj=path, speculation="off", **changes)

    return plan


def test_it_is_on_the_card_and_its_rows_on_the_host(planned: Any) -> None:
    gpu, host = planned({}).usages
    away, home = planned({}, mmproj_offload=False).usages
    patches = 4 * 4096
    compute = 4 * patches * (2 * 1024 + 2 * 4096)
    assert (gpu.weights - away.weights, home.weights - host.weights) == (100 * MIB, 100 * MIB)
    assert (gpu.vision, away.vision, home.vision, host.vision) == (compute, 0, compute, 0)
    assert gpu.pictures == 0
    assert host.pictures == home.pictures == 256 * MIB + min(2 * GIB, host.device.free // 8)


def test_another_arrangement_counts_it_once(planned: Any) -> None:
    plan = planned({})
    again = plan.rearranged(plan.settings.replace(snapshots=0)).rearranged(plan.settings)
    assert [usage.parts for usage in again.usages] == [usage.parts for usage in plan.usages]


def test_without_flash_attention_every_patch_meets_every_other(planned: Any) -> None:
    """Flash attention has kernels for heads of 64 elements, as in the 4B's tower, and of 72, as in the 9B's,
    but none for 32."""
    few = {"image_max_tokens": 256}
    with_kernels = [planned({"clip.vision.attention.head_count": n}, **few).usages[0].vision for n in (16, 8)]
    without = planned({"clip.vision.attention.head_count": 32}, **few).usages[0].vision
    assert with_kernels[0] == with_kernels[1]
    assert without - with_kernels[0] == 4 * 32 * (4 * 256) ** 2
    on_host = [
        planned({"clip.vision.attention.head_count": n}, mmproj_offload=False, **few).usages[1].vision
        for n in (16, 32)
    ]
    assert on_host[0] == on_host[1], "a CPU has flash attention for any"
    with pytest.raises(DoesNotFit, match="mmproj_offload=false, or mmproj=off"):
        planned({"clip.vision.attention.head_count": 32})  # 34 GB for 4,096 tokens


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"clip.vision.projection_dim": 4096}, "is another model's: its rows have 4096 elements"),
        ({"clip.projector_type": "gemma3"}, "has the projector 'gemma3'"),
        ({"general.architecture": "qwen35"}, "is of architecture 'qwen35'; want an mmproj"),
    ],
)
def test_one_that_is_not_this_models_can_be_left_out(
    planned: Any, keys: dict[str, Value], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=f"{message}.*--mmproj off serves without pictures"):
        planned(keys)
