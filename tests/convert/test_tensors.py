"""The tensor plan: names, order, types, and errors."""

import re
from dataclasses import replace
from pathlib import Path
from typing import cast

import gguf
import numpy as np
import pytest

from qwen_serve.convert.checkpoint import Checkpoint
from qwen_serve.convert.errors import CheckpointError
from qwen_serve.convert.safetensors import StoredTensor
from qwen_serve.convert.tensors import FLOAT_TYPES, FloatType, TensorPlan, plan_tensors
from tests.checkpoints import EXPERT_FFN, EXPERTS, HIDDEN, Layout, edit_json, write_checkpoint

LAYERS = tuple(range(8))


def plan(folder: Path, outtype: FloatType = "F16", kept: tuple[int, ...] = LAYERS) -> TensorPlan:
    return plan_tensors(Checkpoint.open(folder), outtype, kept)


def test_the_mtp_block_follows_the_trunk(checkpoint: Path) -> None:
    planned = plan(checkpoint)
    assert (planned.n_blocks, planned.n_mtp_layers) == (9, 1)
    names = {tensor.name for tensor in planned.tensors}
    assert {
        "blk.8.nextn.eh_proj.weight",
        "blk.8.nextn.shared_head_norm.weight",
        "blk.8.attn_q.weight",
    } <= names


def test_vision_is_left_out(checkpoint: Path) -> None:
    assert any("visual" in name for name in Checkpoint.open(checkpoint).tensors)
    assert not any("visual" in tensor.stored.name for tensor in plan(checkpoint).tensors)


@pytest.mark.parametrize("outtype", FLOAT_TYPES)
def test_matrices_take_the_type_asked_for_and_the_rest_is_f32(checkpoint: Path, outtype: FloatType) -> None:
    for tensor in plan(checkpoint, outtype).tensors:
        is_matrix = len(tensor.shape) == 2 and "conv1d" not in tensor.name
        assert tensor.type == (outtype if is_matrix else "F32"), tensor.name


def test_tensors_come_in_the_order_they_lie_in(checkpoint: Path) -> None:
    stored = [cast(StoredTensor, tensor.stored) for tensor in plan(checkpoint).tensors]
    places = [(one.path.name, one.offset) for one in stored]
    assert places == sorted(places)


def test_dropped_layers_are_renumbered_and_the_mtp_block_stays(checkpoint: Path) -> None:
    planned = plan(checkpoint, kept=(0, 1, 2, 3))
    source = {tensor.name: tensor.stored.name for tensor in planned.tensors}
    assert planned.n_blocks == 5
    assert source["blk.4.nextn.eh_proj.weight"] == "mtp.fc.weight"
    assert not any("layers.5." in name for name in source.values())
    behind = {tensor.name: tensor.stored.name for tensor in plan(checkpoint, kept=(4, 5, 6, 7)).tensors}
    assert behind["blk.0.ssm_a"] == "model.language_model.layers.4.linear_attn.A_log"


def test_without_mtp_tensors_there_is_no_mtp_block(tmp_path: Path) -> None:
    planned = plan(write_checkpoint(tmp_path, mtp=False))
    assert (planned.n_blocks, planned.n_mtp_layers) == (8, 0)


def test_a_text_only_checkpoint_with_its_own_output(tmp_path: Path) -> None:
    names = {tensor.name for tensor in plan(write_checkpoint(tmp_path, nested=False, tied=False)).tensors}
    assert {"token_embd.weight", "output.weight"} <= names


def test_a_missing_tensor_is_named(checkpoint: Path) -> None:
    opened = Checkpoint.open(checkpoint)
    name = "mtp.layers.0.self_attn.q_proj.weight"
    rest = {key: value for key, value in opened.tensors.items() if key != name}
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing"):
        plan_tensors(replace(opened, tensors=rest), "F16", LAYERS)


def test_an_unknown_tensor_is_named(checkpoint: Path) -> None:
    opened = Checkpoint.open(checkpoint)
    stranger = next(iter(opened.tensors.values()))
    with pytest.raises(CheckpointError, match=r"no rule for tensor model\.stranger"):
        plan_tensors(replace(opened, tensors={**opened.tensors, "model.stranger": stranger}), "F16", LAYERS)


def test_a_shape_against_the_configuration_is_named(checkpoint: Path) -> None:
    opened = Checkpoint.open(checkpoint)
    name = "model.language_model.norm.weight"
    wrong = {**opened.tensors, name: replace(opened.tensors[name], shape=(HIDDEN + 1,))}
    with pytest.raises(CheckpointError, match=rf"{name} has shape \[65\], config\.json implies \[64\]"):
        plan_tensors(replace(opened, tensors=wrong), "F16", LAYERS)


def test_a_dtype_it_cannot_read_is_named(checkpoint: Path) -> None:
    opened = Checkpoint.open(checkpoint)
    name = "model.language_model.norm.weight"
    wrong = {**opened.tensors, name: replace(opened.tensors[name], dtype="F8_E4M3")}
    with pytest.raises(CheckpointError, match=f"{name} is F8_E4M3; known are BF16, F16, F32"):
        plan_tensors(replace(opened, tensors=wrong), "F16", LAYERS)


# experts

LAYOUTS: tuple[Layout, ...] = ("fused", "per-expert", "per-expert MTP")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_are_one_tensor_a_role_in_either_layout(tmp_path: Path, layout: Layout) -> None:
    shapes = {
        tensor.name: tensor.shape for tensor in plan(write_checkpoint(tmp_path, experts=layout)).tensors
    }
    for block in range(9):  # the MTP block is the last one
        assert shapes[f"blk.{block}.ffn_gate_exps.weight"] == (EXPERTS, EXPERT_FFN, HIDDEN)
        assert shapes[f"blk.{block}.ffn_up_exps.weight"] == (EXPERTS, EXPERT_FFN, HIDDEN)
        assert shapes[f"blk.{block}.ffn_down_exps.weight"] == (EXPERTS, HIDDEN, EXPERT_FFN)
        assert shapes[f"blk.{block}.ffn_gate_inp_shexp.weight"] == (1, HIDDEN)
        assert f"blk.{block}.ffn_gate.weight" not in shapes


def test_a_fused_tensor_is_cut_between_gate_and_up(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, experts="fused", dtype="F32"))
    name = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    whole = checkpoint.tensors[name].read().reshape(EXPERTS, 2, EXPERT_FFN, HIDDEN)
    planned = {tensor.name: tensor for tensor in plan_tensors(checkpoint, "F32", LAYERS).tensors}
    for half, role in enumerate(("gate", "up")):
        tensor = planned[f"blk.1.ffn_{role}_exps.weight"]
        values = tensor.stored.read(0, tensor.n_elements)
        assert (values.reshape(tensor.shape) == whole[:, half]).all()
        assert (tensor.stored.read(1000, 5000) == values[1000:6000]).all()


def test_router_and_shared_gate_stay_f32(tmp_path: Path) -> None:
    for tensor in plan(write_checkpoint(tmp_path, experts="fused"), "BF16").tensors:
        if "ffn_gate_inp" in tensor.name:
            assert tensor.type == "F32"
        elif "_exps" in tensor.name or "_shexp" in tensor.name:
            assert tensor.type == "BF16"


def test_parameters_are_counted_as_gguf_counts_them(tmp_path: Path) -> None:
    planned = plan(write_checkpoint(tmp_path, experts="per-expert"))
    writer = gguf.GGUFWriter(path=None, arch="qwen35moe")
    for t in planned.tensors:
        writer.add_tensor_info(t.name, t.shape, np.dtype("<f2"), t.nbytes)
    counts = planned.parameter_counts
    assert (
        counts.total,
        counts.shared,
        counts.one_expert,
        counts.experts,
    ) == writer.get_total_parameter_count()


@pytest.mark.parametrize(
    ("layout", "gone", "named"),
    [
        ("fused", "layers.2.mlp.experts.down_proj", "layers.2.mlp.experts.down_proj is missing"),
        ("fused", "layers.2.mlp.experts.gate_up_proj", "layers.2.mlp.experts.gate_up_proj is missing"),
        ("per-expert", "layers.2.mlp.experts.3.up_proj.weight", "experts.3.up_proj.weight is missing"),
    ],
)
def test_a_missing_expert_is_named(tmp_path: Path, layout: Layout, gone: str, named: str) -> None:
    opened = Checkpoint.open(write_checkpoint(tmp_path, experts=layout))
    rest = {name: tensor for name, tensor in opened.tensors.items() if not name.endswith(gone)}
    with pytest.raises(CheckpointError, match=re.escape(named)):
        plan_tensors(replace(opened, tensors=rest), "F16", LAYERS)


def test_an_expert_of_another_shape_is_named(tmp_path: Path) -> None:
    opened = Checkpoint.open(write_checkpoint(tmp_path, experts="per-expert"))
    name = "model.language_model.layers.0.mlp.experts.2.up_proj.weight"
    changed = {**opened.tensors, name: replace(opened.tensors[name], shape=(HIDDEN, EXPERT_FFN))}
    with pytest.raises(CheckpointError, match=r"experts\.2\.up_proj\.weight is BF16 of shape \[64, 32\]"):
        plan_tensors(replace(opened, tensors=changed), "F16", LAYERS)


def test_widths_that_do_not_fit_are_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, experts="fused", nested=False)
    edit_json(folder / "config.json", moe_intermediate_size=EXPERT_FFN + 1)
    with pytest.raises(CheckpointError, match=r"gate_proj has shape \[6, 32, 64\], .*\[6, 33, 64\]"):
        plan(folder)
    edit_json(folder / "config.json", num_experts_per_tok=7)
    with pytest.raises(CheckpointError, match=r"num_experts_per_tok \(7\) must be at most num_experts \(6\)"):
        plan(folder)
