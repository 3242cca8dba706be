"""Sizes that the plan chooses, and errors if memory is too small."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qwen_serve.llamacpp import Device
from qwen_serve.llamacpp.gguf import read_header
from qwen_serve.server.engine import DoesNotFit, EngineSettings, ModelLoadError
from qwen_serve.server.engine.planning import devices, measured
from qwen_serve.server.engine.planning.fit import plan_memory
from qwen_serve.server.engine.planning.sequence_ids import SequenceIds
from qwen_serve.server.engine.planning.spec import ModelSpec
from tests.server.engine.planning.cards import (
    FOUR_B,
    GIB,
    MIB,
    PLAN,
    decided,
    four_b,
    four_b_plan,
    header_of,
    share_snapshots,
)


@pytest.mark.usefixtures("own_cells")
@pytest.mark.parametrize(("free", "parallel"), [(12, 8), (16, 8), (23, 8), (23, 64), (30, 8), (79, 64)])
def test_where_held_cells_cost_little_the_prefix_cache_has_half_of_what_is_left(
    card: Any, monkeypatch: pytest.MonkeyPatch, free: int, parallel: int
) -> None:
    card(free * GIB)
    chosen = four_b_plan(speculation="both", parallel=parallel)
    monkeypatch.setattr(f"{PLAN}.READS_OWN_CELLS", False)
    usual = four_b_plan(speculation="both", parallel=parallel)
    assert chosen.settings.snapshots == usual.settings.snapshots == 8
    assert chosen.settings.prefix_cells == 131_072
    ids, more = len(SequenceIds.of(chosen.settings)), chosen.settings.ctx_size - usual.settings.ctx_size
    assert 0 <= more <= 131_072 - usual.settings.prefix_cells
    assert (free < 23) or chosen.settings.prefix_checkpoints > usual.settings.prefix_checkpoints
    left = usual.usages[0].left
    assert left / 2 <= chosen.usages[0].left
    if ids < 256:  # and not much less, as far as it goes in parts
        assert chosen.usages[0].left <= left / 2 + (208 * chosen.spec.state + 2**17 * 2**15) / 16
    assert (ids == 256) == (free > 30) == (more == 131_072 - usual.settings.prefix_cells)


@pytest.mark.usefixtures("own_cells")
def test_what_is_asked_for_of_the_prefix_cache_stays_and_costs_no_other_size(card: Any) -> None:
    card(79 * GIB)
    assert four_b_plan(prefix_checkpoints=20).settings.prefix_checkpoints == 20
    cells = four_b_plan(prefix_cells=5000).settings
    assert (cells.prefix_cells, cells.ctx_size, cells.prefix_checkpoints) == (5000, 136_192, 240)
    pool = four_b_plan(ctx_size=65_536).settings
    assert (pool.prefix_cells, pool.ctx_size, pool.prefix_checkpoints) == (65_536, 65_536, 240)
    assert four_b_plan(prefix_cache=False).settings.prefix_checkpoints == 0


@pytest.mark.usefixtures("own_cells")
@pytest.mark.parametrize(
    "changes",
    [
        {"cache_type_k": "q8_0"},
        {"flash_attn": "off"},
        {"n_gpu_layers": 20},
        {"n_gpu_layers": 0},
        {"deterministic": True, "speculation": "off"},
    ],
)
def test_where_steps_read_what_others_hold_the_prefix_cache_stays_small(
    card: Any, changes: dict[str, Any]
) -> None:
    card(79 * GIB)
    chosen = four_b_plan(**changes).settings
    assert chosen.prefix_checkpoints == (8 if "deterministic" in changes else 32)
    assert chosen.prefix_cells < 20_000


@pytest.mark.usefixtures("own_cells")
@pytest.mark.parametrize("free", [5, 6, 9, 10.5])
def test_nobody_gives_up_anything_for_the_prefix_cache(
    card: Any, monkeypatch: pytest.MonkeyPatch, free: float
) -> None:
    card(int(free * GIB))
    chosen = four_b_plan(speculation="both").settings
    monkeypatch.setattr(f"{PLAN}.READS_OWN_CELLS", False)
    assert four_b_plan(speculation="both").settings == chosen


@pytest.mark.usefixtures("own_cells")
def test_buffers_that_come_with_more_ids_are_part_of_its_share(
    card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    card(23 * GIB)
    small = four_b_plan()

    def profile_run(settings: EngineSettings, *_: object) -> dict[str, int]:
        ids = len(SequenceIds.of(settings))
        return {"CUDA0": 300 * MIB, "CUDA_Host": 20 * MIB + 200 * MIB * (ids - 40)}

    monkeypatch.setattr(f"{PLAN}.profile_run", profile_run)
    plan = four_b_plan()
    assert 32 < plan.settings.prefix_checkpoints < small.settings.prefix_checkpoints
    assert plan.usages[1].left > 14 * GIB


def test_with_deterministic_every_sequence_and_state_has_cells_of_its_own(card: Any) -> None:
    card(23 * GIB)
    plan = four_b_plan(deterministic=True, speculation="off")
    assert plan.settings.prefix_checkpoints == 8
    assert plan.settings.ctx_size == (8 + 8) * 16_384
    assert "16,384 each" in str(plan)
    asked = four_b_plan(deterministic=True, speculation="off", ctx_size=8 * 1000, prefix_checkpoints=3)
    assert asked.settings.ctx_size == (8 + 3) * 1024
    card(8 * GIB)
    small = four_b_plan(deterministic=True, speculation="off").settings
    assert small.ctx_size % (256 * (8 + small.prefix_checkpoints)) == 0


@pytest.mark.parametrize(
    ("shared", "free", "snapshots", "checkpoints"),
    [
        (False, 40, 2, 32),
        (False, 16, 2, 32),
        (False, 14, 2, 24),
        (False, 13, 2, 18),
        (False, 11, 1, 16),
        (False, 10.5, 0, 32),
        (True, 40, 8, 32),
        (True, 11, 8, 32),
    ],
)
def test_snapshots_and_checkpoints_make_room_for_each_other(
    card: Any, monkeypatch: pytest.MonkeyPatch, shared: bool, free: float, snapshots: int, checkpoints: int
) -> None:
    share_snapshots(monkeypatch, shared)
    card(int(free * GIB))
    chosen = four_b_plan(speculation="both").settings
    assert (chosen.snapshots, chosen.prefix_checkpoints) == (snapshots, checkpoints)
    assert chosen.ctx_size == 8 * 16_384 + chosen.prefix_cells


@pytest.mark.parametrize(
    ("changes", "ubatch", "batch"),
    [
        ({}, 2304, 8192),
        ({"ubatch_size": 512}, 512, 2048),
        ({"ubatch_size": 16, "parallel": 100}, 16, 100),
        ({"batch_size": 3000}, 2304, 3000),
        ({"n_gpu_layers": 0}, 512, 2048),
        ({"n_gpu_layers": 0, "ubatch_size": 128}, 128, 2048),
        ({"n_gpu_layers": 0, "ubatch_size": 4096}, 4096, 4096),
        ({"n_gpu_layers": 0, "batch_size": 100}, 512, 100),
    ],
)
def test_a_step_is_several_passes_on_a_gpu(
    card: Any, changes: dict[str, int], ubatch: int, batch: int
) -> None:
    card(60 * GIB)
    chosen = four_b_plan(**changes).settings
    assert (chosen.ubatch_size, chosen.batch_size) == (ubatch, batch)


def test_a_step_follows_the_pass_that_fits(card: Any) -> None:
    card(6 * GIB)
    chosen = four_b_plan().settings
    assert (chosen.ubatch_size, chosen.batch_size) == (512, 2048)
    chosen = four_b_plan(batch_size=3000).settings
    assert (chosen.ubatch_size, chosen.batch_size) == (512, 3000)
    chosen = four_b_plan(ubatch_size=1024).settings
    assert (chosen.ubatch_size, chosen.batch_size) == (1024, 4096)


@pytest.mark.parametrize(("shared", "alone", "crowd"), [(False, 2, 0), (True, 8, 8)])
def test_snapshots_are_for_drafts(
    card: Any, monkeypatch: pytest.MonkeyPatch, shared: bool, alone: int, crowd: int
) -> None:
    share_snapshots(monkeypatch, shared)
    card(60 * GIB)
    assert four_b_plan(speculation="both").settings.snapshots == alone
    assert four_b_plan(speculation="both", mtp_depth=1).settings.snapshots == 1
    assert four_b_plan(speculation="both", parallel=9).settings.snapshots == crowd
    assert four_b_plan(speculation="both", parallel=9, snapshots=2).settings.snapshots == 2
    assert four_b_plan(speculation="both", snapshots=20).settings.snapshots == 20
    assert four_b_plan(speculation="both", batch_size=8, ubatch_size=3).settings.snapshots == 1
    assert four_b_plan(speculation="ngram", snapshots=2).settings.snapshots == 2
    assert four_b_plan(speculation="off").settings.snapshots == 0
    nothing = r"snapshots is 2, but with speculation=off nothing is drafted .* set another speculation"
    with pytest.raises(ModelLoadError, match=nothing):
        four_b_plan(speculation="off", snapshots=2)
    with pytest.raises(
        ModelLoadError, match=r"snapshots is 2; with ubatch_size 3 and batch_size 8 .* most 1"
    ):
        four_b_plan(speculation="both", batch_size=8, ubatch_size=3, snapshots=2)
    exact = partial(four_b_plan, deterministic=True)
    assert exact(speculation="both").settings.snapshots == alone
    assert exact(speculation="both", snapshots=15).settings.snapshots == 15
    with pytest.raises(ModelLoadError, match=r"snapshots is 16; with deterministic, .* it can be at most 15"):
        exact(speculation="both", snapshots=16)
    with pytest.raises(ModelLoadError, match=nothing):
        exact(speculation="off", snapshots=2)
    share_snapshots(monkeypatch, False)
    card(12 * GIB)
    with pytest.raises(DoesNotFit, match="snapshots=0"):
        four_b_plan(speculation="both", snapshots=8, ctx_size=131_072, prefix_checkpoints=16)


@pytest.mark.parametrize(("wanted", "left"), [("both", "ngram"), ("mtp", "off")])
def test_a_file_without_a_head_is_named_once(
    card: Any, caplog: pytest.LogCaptureFixture, wanted: Any, left: str
) -> None:
    card(23 * GIB)
    tensors = {name: tensor for name, tensor in four_b().tensors.items() if "blk.32" not in name}
    metadata = {**FOUR_B, "qwen35.block_count": 32, "qwen35.nextn_predict_layers": 0}
    header = replace(four_b(), metadata=metadata, tensors=tensors)
    plan = plan_memory(
        EngineSettings(model=Path("4b.gguf"), threads=1, threads_batch=1, speculation=wanted), header
    )
    assert plan.settings.speculation == left
    assert [record.message.count("no multi-token-prediction head") for record in caplog.records] == [1]


def test_many_sequences_share_what_is_enough_for_some(card: Any) -> None:
    card(100 * GIB)
    assert four_b_plan(parallel=64).settings.ctx_size == 262_144 + 9216


def test_a_context_that_is_left_open_shrinks_to_what_fits(card: Any) -> None:
    card(6 * GIB)
    plan = four_b_plan()
    assert 2048 <= plan.settings.ctx_size < 8 * 16_384
    assert not any(usage.short for usage in plan.usages)


def test_the_shortfall_and_what_would_help_are_named(card: Any) -> None:
    card(6 * GIB)
    with pytest.raises(DoesNotFit) as caught:
        four_b_plan(speculation="off", ctx_size=131_072)
    message = str(caught.value)
    assert re.search(r"CUDA0: 7\.\d GiB are needed and 6\.0 GiB are free; \d\.\d GiB are missing", message)
    cells = re.search(r"ctx_size=(\d+)", message)
    assert cells
    four_b_plan(speculation="off", ctx_size=int(cells[1]))
    with pytest.raises(DoesNotFit):
        four_b_plan(speculation="off", ctx_size=int(cells[1]) + 4096)
    assert "cache_type_k=q8_0" in message
    four_b_plan(speculation="off", ctx_size=131_072, cache_type_k="q8_0", cache_type_v="q8_0")
    layers = re.search(r"n_gpu_layers=(\d+)", message)
    assert layers
    four_b_plan(speculation="off", ctx_size=131_072, n_gpu_layers=int(layers[1]))


def test_speculation_is_named_where_it_is_what_does_not_fit(card: Any) -> None:
    card(9 * GIB)
    with pytest.raises(DoesNotFit, match="speculation=off"):
        four_b_plan(ctx_size=131_072, prefix_checkpoints=20)
    four_b_plan(ctx_size=131_072, prefix_checkpoints=20, speculation="off")


def test_when_only_the_number_of_sequences_is_too_large_that_is_said(card: Any) -> None:
    card(7 * GIB)
    with pytest.raises(DoesNotFit, match=r"parallel=\d") as caught:
        four_b_plan(ctx_size=16_384, parallel=100)
    suggested = re.search(r"parallel=(\d+)", str(caught.value))
    assert suggested
    four_b_plan(ctx_size=16_384, parallel=int(suggested[1]))


def test_checkpoints_give_way_to_what_must_fit_unless_they_are_asked_for(card: Any) -> None:
    card(6 * GIB)
    assert 0 < four_b_plan().settings.prefix_checkpoints < 32
    card(5 * GIB)
    with pytest.raises(DoesNotFit, match=r"prefix_checkpoints=\d") as caught:
        four_b_plan(ctx_size=16_384, prefix_checkpoints=60)
    suggested = re.search(r"prefix_checkpoints=(\d+)", str(caught.value))
    assert suggested
    four_b_plan(ctx_size=16_384, prefix_checkpoints=int(suggested[1]))
    assert four_b_plan(ctx_size=16_384, prefix_cache=False).usages[0].states < GIB


def test_a_large_model_may_hold_more_cells_for_the_same_slowdown(card: Any) -> None:
    card(23 * GIB)
    header = header_of({name: 3 * tensor.n_bytes for name, tensor in four_b().tensors.items()})
    plan = plan_memory(EngineSettings(model=Path("4b.gguf"), threads=1, threads_batch=1, parallel=2), header)
    weights = 3 * ((32 * 70 + 500) * MIB + 10240)
    assert plan.settings.prefix_cells == pytest.approx(0.1 * weights / (32 * 1024), abs=256)


def test_host_memory_for_checkpoints_is_planned_too(card: Any) -> None:
    card(23 * GIB)
    assert four_b_plan(prefix_host_mib=4096).usages[1].saved == 4 * GIB
    with pytest.raises(DoesNotFit, match=r"CPU: .*prefix_host_mib=\d+") as caught:
        four_b_plan(prefix_host_mib=40_000)
    suggested = re.search(r"prefix_host_mib=(\d+)", str(caught.value))
    assert suggested
    four_b_plan(prefix_host_mib=int(suggested[1]))


def test_hidden_states_are_named_where_they_are_what_does_not_fit(card: Any) -> None:
    card(200 * GIB)
    wanted: dict[str, Any] = {"speculation": "mtp", "parallel": 64, "draft_window": 2**21}
    with pytest.raises(DoesNotFit, match=r"CPU: .*draft_window=\d+") as caught:
        four_b_plan(**wanted)
    assert re.search(r"hidden states for drafters +- +40.\d GiB", str(caught.value))
    suggested = re.search(r"draft_window=(\d+)", str(caught.value))
    assert suggested
    window = int(suggested[1])
    four_b_plan(**{**wanted, "draft_window": window})
    with pytest.raises(DoesNotFit):
        four_b_plan(**{**wanted, "draft_window": window + 1})


@pytest.mark.parametrize("cells", [99_999_999_999, 30_000_000])
def test_a_context_that_can_not_be_is_refused_at_once_with_one_that_fits(
    nano_q4_k_m: Path, monkeypatch: pytest.MonkeyPatch, cells: int
) -> None:
    monkeypatch.setattr(devices, "available_memory", lambda: 4 * GIB)
    profiled: list[int] = []

    def watched(
        settings: EngineSettings, spec: ModelSpec, places: Sequence[Device], *_: object
    ) -> dict[str, int]:
        profiled.append(settings.ctx_size)
        return measured.profile_run(settings, spec, places, None)

    monkeypatch.setattr(f"{PLAN}.profile_run", watched)
    wanted = decided(nano_q4_k_m, speculation="both", ctx_size=cells)
    with pytest.raises(DoesNotFit, match=r"CPU: .*ctx_size=\d+") as caught:
        plan_memory(wanted, read_header(nano_q4_k_m))
    assert max(profiled) * plan_cell(nano_q4_k_m) < 4 * GIB, "the profile run allocates in proportion"
    suggested = re.search(r"ctx_size=(\d+)", str(caught.value))
    assert suggested
    plan = plan_memory(wanted.replace(ctx_size=int(suggested[1])), read_header(nano_q4_k_m))
    host = plan.usages[0]
    assert host.compute > host.kv / 2, "compute buffers are counted, too"
    assert host.total > 3.5 * GIB, "it is not much less than what fits"


def plan_cell(model: Path) -> int:
    return ModelSpec.from_header(read_header(model)).cell(decided(model))


@pytest.mark.parametrize("bend", [0, 100_000])
def test_advice_counts_the_buffers_that_grow_with_the_context(
    card: Any, monkeypatch: pytest.MonkeyPatch, bend: int
) -> None:
    card(12 * GIB)

    def buffers(settings: EngineSettings, *_: object) -> dict[str, int]:
        cells = settings.ctx_size
        return {"CUDA0": 300 * MIB + 16 * 1024 * cells + 16 * 1024 * max(0, cells - bend)}

    monkeypatch.setattr(f"{PLAN}.profile_run", buffers)
    with pytest.raises(DoesNotFit) as caught:
        four_b_plan(speculation="off", ctx_size=1_000_000)
    suggested = re.search(r"ctx_size=(\d+)", str(caught.value))
    assert suggested
    cells = int(suggested[1])
    four_b_plan(speculation="off", ctx_size=cells)
    with pytest.raises(DoesNotFit):
        four_b_plan(speculation="off", ctx_size=cells + 20_000)


def test_what_does_not_fit_without_flash_attention_is_refused_too(card: Any) -> None:
    card(6 * GIB)
    with pytest.raises(DoesNotFit, match="ctx_size=") as caught:
        four_b_plan(speculation="off", ctx_size=131_072, flash_attn="off")
    assert "q8_0" not in str(caught.value), "a packed cache needs flash attention"


def test_weights_that_are_too_large_call_for_a_smaller_quantization(card: Any) -> None:
    card(1 * GIB)
    with pytest.raises(DoesNotFit, match="CUDA0"):
        four_b_plan()


def test_a_gpu_that_is_not_there_is_refused(card: Any) -> None:
    card(23 * GIB)
    with pytest.raises(ModelLoadError, match="main_gpu is 3"):
        four_b_plan(main_gpu=3)
