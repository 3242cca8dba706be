"""The memory plan against what llama.cpp allocates, and what it says when memory is too small."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qwen_serve.llamacpp import Context, Device, Model, supports_gpu
from qwen_serve.llamacpp.errors import LlamaError
from qwen_serve.llamacpp.mtp import MtpContext
from qwen_serve.server.engine import DoesNotFit, Engine, EngineSettings, ModelLoadError, memory, sizes
from qwen_serve.server.engine.contexts import (
    context_options,
    draft_context,
    head_options,
    load_draft,
    uses_mtp,
)
from qwen_serve.server.engine.gguf import Header, Value, read_header
from qwen_serve.server.engine.loading import decide
from qwen_serve.server.engine.memory import MemoryPlan
from qwen_serve.server.engine.model_file import ModelFile
from qwen_serve.server.engine.model_spec import ModelSpec
from qwen_serve.server.engine.sequence_ids import SequenceIds
from qwen_serve.server.engine.sizes import plan_memory
from tests.server.engine.helpers import settings

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not supports_gpu(), reason="no GPU, or llama-cpp-python built without CUDA"),
]
MIB, GIB = 1024**2, 1024**3


def decided(model: Path, **changes: Any) -> EngineSettings:
    return settings(model, **{"threads_batch": 1, "prefill_budget": 64, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parallel": 16, "ctx_size": 32768, "cache_type_k": "q8_0", "cache_type_v": "q8_0"},
        {"speculation": "off"},
        {"speculation": "both"},
        {"speculation": "both", "snapshots": 0},
        {"speculation": "draft", "draft_window": 64},
        {"ubatch_size": 64, "flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32"},
        {"deterministic": True, "ctx_size": 4 * 1000, "flash_attn": "off", "speculation": "off"},
        pytest.param({"n_gpu_layers": -1}, marks=ON_GPU),
        pytest.param({"n_gpu_layers": 5, "ctx_size": 8192}, marks=ON_GPU),
    ],
)
def test_the_plan_is_what_llama_cpp_allocates(
    nano_q4_k_m: Path, nano_draft_q4_k_m: Path, changes: dict[str, Any]
) -> None:
    beside = {"draft_model": nano_draft_q4_k_m} if "draft_window" in changes else {}
    wanted = decided(nano_q4_k_m, **changes, **beside)
    plan = plan_memory(wanted, read_header(nano_q4_k_m))
    by_head = uses_mtp(plan.settings, plan.spec)
    assert by_head == (wanted.speculation == "both")
    model = Model(
        nano_q4_k_m,
        n_gpu_layers=wanted.n_gpu_layers,
        embedding_on=plan.embedding_on.name if plan.embedding_on else None,
        use_mmap=False,
        load_mtp=by_head,
    )
    contexts = [Context(model, context_options(plan.settings))]
    if by_head:
        contexts.append(MtpContext(model, head_options(plan.settings)))
    models = [model]
    if (spec := plan.spec.draft) is not None:
        models.insert(0, load_draft(plan.settings.replace(use_mmap=False), spec))
        contexts.insert(0, draft_context(plan.settings, spec, models[0], contexts[0]))
    text = "\n".join(
        [
            *(line for one in models for line in one.log),
            *(line for context in contexts for line in context.log),
        ]
    )
    for context in contexts:
        context.close()
    for one in models:
        one.close()
    assert len(plan.usages) == (2 if wanted.n_gpu_layers else 1)

    for usage in plan.usages:
        place = usage.device.name if usage.device.is_gpu else r"(?:CPU|\S+_Host)\S*"

        def allocated(kind: str, place: str = place) -> float:
            return sum(float(x) for x in re.findall(rf" {place} +{kind} buffer size = *([0-9.]+) MiB", text))

        if "AMX model buffer" in text:  # a layout of its own, which takes more
            assert allocated("model", "CPU") < usage.weights / MIB < allocated("model", "(?:CPU|AMX)")
        else:
            assert usage.weights / MIB == pytest.approx(allocated("model"), abs=0.05)
        assert usage.kv / MIB == pytest.approx(allocated("KV"), abs=0.01)
        assert usage.states / MIB == pytest.approx(allocated("RS"), abs=0.01)
        assert usage.compute / MIB == pytest.approx(allocated("compute") + allocated("output"), abs=0.02)


# --- a card that this machine does not have ----------------------------------------------------------------

FOUR_B: dict[str, Value] = {
    "general.architecture": "qwen35",
    "qwen35.block_count": 33,
    "qwen35.nextn_predict_layers": 1,
    "qwen35.context_length": 262_144,
    "qwen35.embedding_length": 2560,
    "qwen35.attention.head_count": 16,
    "qwen35.attention.head_count_kv": 4,
    "qwen35.attention.key_length": 256,
    "qwen35.attention.value_length": 256,
    "qwen35.full_attention_interval": 4,
    "qwen35.ssm.conv_kernel": 4,
    "qwen35.ssm.state_size": 128,
    "qwen35.ssm.group_count": 16,
    "qwen35.ssm.inner_size": 4096,
}
"""Qwen3.5-4B's sizes."""

FILE = Path("4b.gguf")
FOUND = ModelFile(FILE, 0, 0, 0, 0)

NO_ROWS = 35
"""TQ2_0, of which CUDA takes no rows."""


def four_b() -> Header:
    layers = {f"blk.{i}.ffn_up.weight": 70 * MIB for i in range(33)}
    return Header(FOUND, FOUR_B, {"token_embd.weight": 500 * MIB, "output_norm.weight": 10240, **layers})


def share_snapshots(monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    for module in (memory, sizes):
        monkeypatch.setattr(module, "SHARES_SNAPSHOTS", shared)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend that there are GPUs with so many bytes free, 32 GiB of host memory, and of the patches that
    sizes depend on shared-snapshots alone."""
    share_snapshots(monkeypatch, True)
    monkeypatch.setattr(memory, "READS_OWN_CELLS", False)
    monkeypatch.setattr(memory, "takes_rows", lambda name, ggml_type, width: ggml_type != NO_ROWS)

    def pretend(*free: int) -> None:
        found = [
            Device(f"CUDA{i}", "NVIDIA A10G", is_gpu=True, free=bytes_, total=24 * GIB)
            for i, bytes_ in enumerate(free)
        ]
        found.append(Device("CPU", "a processor", is_gpu=False, free=32 * GIB, total=64 * GIB))
        buffers = {f"CUDA{i}": 300 * MIB for i in range(len(free))}
        monkeypatch.setattr(sizes, "devices", lambda: found)
        monkeypatch.setattr(sizes, "available_memory", lambda: None)
        monkeypatch.setattr(memory, "_rehearse", lambda *_: {**buffers, "CUDA_Host": 20 * MIB})

    return pretend


def four_b_plan(**changes: Any) -> MemoryPlan:
    # What fits is decided without the file; `_rehearse` is replaced.
    return plan_memory(EngineSettings(model=Path("4b.gguf"), threads=1, threads_batch=1, **changes), four_b())


def test_the_spec_of_the_4b() -> None:
    spec = ModelSpec.from_header(four_b())
    assert spec.n_embd == 2560
    assert spec.state == pytest.approx(50.5e6, rel=0.05)  # design fact: about 50 MB a sequence
    cell = sum(spec.kv_cell(i, EngineSettings(model=Path("4b.gguf"))) for i in range(32))
    assert cell == 32 * 1024
    assert spec.mtp_weights == 70 * MIB
    assert [keys > 0 for keys, _ in spec.kv_elements] == [False, False, False, True] * 8


@pytest.mark.parametrize("speculation", ["ngram", "both"])
def test_the_default_plan_gives_eight_sequences_16k_each_on_a_24_gb_card(card: Any, speculation: str) -> None:
    card(23 * GIB)
    plan = four_b_plan(speculation=speculation)
    by_head = speculation == "both"
    gpu, host = plan.usages
    assert plan.settings.ctx_size == 8 * 16_384 + plan.settings.prefix_cells
    assert plan.settings.prefix_checkpoints == 32
    assert plan.settings.prefix_cells == 9216  # a tenth of the weights' bytes is less
    assert gpu.weights == ((33 if by_head else 32) * 70 + 500) * MIB + 10240
    assert host.weights == 0  # the embedding is the head
    head = 16_384 * 4 * 1024 if by_head else 0
    assert (gpu.kv, host.kv) == (plan.settings.ctx_size * 32 * 1024 + head, 0)
    state, snapshots = plan.spec.state, 8 if by_head else 0
    assert plan.settings.snapshots == snapshots
    assert gpu.states == (8 + 8 + 32 + snapshots) * state
    assert gpu.settling == (2 * state if by_head else 0)
    assert (gpu.compute, host.compute) == (300 * MIB, 20 * MIB)
    assert "NVIDIA A10G" in str(plan)


@pytest.fixture
def own_cells(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What steps of their own cells take as well."""
    monkeypatch.setattr(memory, "READS_OWN_CELLS", True)


@pytest.mark.usefixtures("own_cells")
@pytest.mark.parametrize(("free", "parallel"), [(12, 8), (16, 8), (23, 8), (23, 64), (30, 8), (79, 64)])
def test_where_held_cells_cost_little_the_prefix_cache_has_half_of_what_is_left(
    card: Any, monkeypatch: pytest.MonkeyPatch, free: int, parallel: int
) -> None:
    card(free * GIB)
    chosen = four_b_plan(speculation="both", parallel=parallel)
    monkeypatch.setattr(memory, "READS_OWN_CELLS", False)
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
    monkeypatch.setattr(memory, "READS_OWN_CELLS", False)
    assert four_b_plan(speculation="both").settings == chosen


@pytest.mark.usefixtures("own_cells")
def test_buffers_that_come_with_more_ids_are_part_of_its_share(
    card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    card(23 * GIB)
    small = four_b_plan()

    def rehearse(settings: EngineSettings, *_: object) -> dict[str, int]:
        ids = len(SequenceIds.of(settings))
        return {"CUDA0": 300 * MIB, "CUDA_Host": 20 * MIB + 200 * MIB * (ids - 40)}

    monkeypatch.setattr(memory, "_rehearse", rehearse)
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
        ({}, 2048, 8192),
        ({"ubatch_size": 512}, 512, 2048),
        ({"ubatch_size": 16, "parallel": 100}, 16, 100),
        ({"batch_size": 3000}, 2048, 3000),
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
    assert four_b_plan(speculation="off", snapshots=2).settings.snapshots == 0
    share_snapshots(monkeypatch, False)
    card(12 * GIB)
    with pytest.raises(DoesNotFit, match="snapshots=0"):
        four_b_plan(speculation="both", snapshots=8, ctx_size=131_072, prefix_checkpoints=16)


@pytest.mark.parametrize(("wanted", "left"), [("both", "ngram"), ("mtp", "off")])
def test_a_file_without_a_head_is_named_once(
    card: Any, caplog: pytest.LogCaptureFixture, wanted: Any, left: str
) -> None:
    card(23 * GIB)
    tensors = {name: size for name, size in four_b().tensors.items() if "blk.32" not in name}
    header = Header(FOUND, {**FOUR_B, "qwen35.block_count": 32, "qwen35.nextn_predict_layers": 0}, tensors)
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


def test_layers_that_stay_on_the_host_keep_their_cache_there(card: Any) -> None:
    card(23 * GIB)
    gpu, host = four_b_plan(n_gpu_layers=10, ctx_size=1024, speculation="off").usages
    # 33 blocks and the head make 34; the last 10 are the head, the MTP block (not loaded) and 8 layers
    assert gpu.weights == (8 * 70 + 500) * MIB + 10240
    assert host.weights == (24 * 70 + 500) * MIB
    assert gpu.kv * 3 == host.kv
    on_host = four_b_plan(n_gpu_layers=0, ctx_size=1024, speculation="off")
    assert on_host.usages[0].weights == (32 * 70 + 500) * MIB + 10240


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
    header = Header(FOUND, FOUR_B, {name: size * 3 for name, size in four_b().tensors.items()})
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


def test_hidden_states_of_the_head_are_planned(card: Any) -> None:
    card(23 * GIB)
    gpu, host = four_b_plan(speculation="both").usages
    assert (gpu.hidden, host.hidden) == (0, ((8 + 32) * 128 + 2 * 512) * 2560 * 4)
    assert host.total == sum([host.weights, host.compute, host.cells, host.hidden])
    assert four_b_plan(speculation="ngram").usages[1].hidden == 0
    assert re.search(r"hidden states for drafters +- +60.0 MiB", str(four_b_plan(speculation="both")))


def test_hidden_states_are_named_where_they_are_what_does_not_fit(card: Any) -> None:
    card(200 * GIB)
    wanted: dict[str, Any] = {"speculation": "mtp", "parallel": 64, "mtp_window": 2**21}
    with pytest.raises(DoesNotFit, match=r"CPU: .*mtp_window=\d+") as caught:
        four_b_plan(**wanted)
    assert re.search(r"hidden states for drafters +- +40.\d GiB", str(caught.value))
    suggested = re.search(r"mtp_window=(\d+)", str(caught.value))
    assert suggested
    window = int(suggested[1])
    four_b_plan(**{**wanted, "mtp_window": window})
    with pytest.raises(DoesNotFit):
        four_b_plan(**{**wanted, "mtp_window": window + 1})


@pytest.mark.parametrize("cells", [99_999_999_999, 30_000_000])
def test_a_context_that_can_not_be_is_refused_at_once_with_one_that_fits(
    nano_q4_k_m: Path, monkeypatch: pytest.MonkeyPatch, cells: int
) -> None:
    monkeypatch.setattr(sizes, "available_memory", lambda: 4 * GIB)
    rehearse, rehearsed = memory._rehearse, []

    def watched(settings: EngineSettings, spec: ModelSpec, places: Sequence[Device]) -> dict[str, int]:
        rehearsed.append(settings.ctx_size)
        return rehearse(settings, spec, places)

    monkeypatch.setattr(memory, "_rehearse", watched)
    wanted = decided(nano_q4_k_m, speculation="both", ctx_size=cells)
    with pytest.raises(DoesNotFit, match=r"CPU: .*ctx_size=\d+") as caught:
        plan_memory(wanted, read_header(nano_q4_k_m))
    assert max(rehearsed) * plan_cell(nano_q4_k_m) < 4 * GIB, "the rehearsal allocates in proportion"
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

    monkeypatch.setattr(memory, "_rehearse", buffers)
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


@pytest.mark.parametrize(
    ("changes", "slots", "rollback", "checkpoints", "lone"),
    [
        ({}, range(8), range(8, 16), range(16, 48), range(2)),
        ({"speculation": "mtp"}, range(8), range(8, 10), range(10, 42), range(2)),
        ({"speculation": "mtp", "parallel": 1}, range(1), range(1, 2), range(2, 34), range(1)),
        ({"speculation": "ngram", "parallel": 64}, range(64), range(64, 80), range(80, 112), range(2)),
        ({"speculation": "off"}, range(8), range(8, 8), range(8, 40), range(0)),
        ({"prefix_cache": False}, range(8), range(8, 16), range(16, 16), range(2)),
        ({"parallel": 250}, range(250), range(250, 256), range(256, 256), range(2)),
        ({"parallel": 256}, range(256), range(256, 256), range(256, 256), range(0)),
    ],
)
def test_each_sequence_id_serves_one_purpose(
    card: Any, changes: dict[str, Any], slots: range, rollback: range, checkpoints: range, lone: range
) -> None:
    card(100 * GIB)
    settings = four_b_plan(**{"speculation": "both", "ctx_size": 4096, **changes}).settings
    ids = SequenceIds.of(settings)
    assert (ids.slots, ids.rollback, ids.checkpoints) == (slots, rollback, checkpoints)
    assert ids.lone == lone
    assert context_options(settings).n_seq == len(ids) == checkpoints.stop


@pytest.mark.parametrize("parallel", [1, 240, 256])
def test_there_are_never_more_than_256_sequences(card: Any, parallel: int) -> None:
    card(100 * GIB)
    plan = four_b_plan(parallel=parallel, ctx_size=4096)
    assert len(SequenceIds.of(plan.settings)) <= 256


def test_weights_that_are_too_large_call_for_a_smaller_quantization(card: Any) -> None:
    card(1 * GIB)
    with pytest.raises(DoesNotFit, match="CUDA0"):
        four_b_plan()


def test_a_gpu_that_is_not_there_is_refused(card: Any) -> None:
    card(23 * GIB)
    with pytest.raises(ModelLoadError, match="main_gpu is 3"):
        four_b_plan(main_gpu=3)


def test_the_token_embedding_is_on_the_host_where_that_is_wanted(card: Any) -> None:
    card(23 * GIB)
    gpu, host = four_b_plan(offload_embedding=False, speculation="off").usages
    assert gpu.weights == (32 * 70 + 500) * MIB + 10240
    assert host.weights == 500 * MIB


def test_an_embedding_of_a_type_that_the_gpu_does_not_look_up_is_on_the_host(card: Any) -> None:
    card(23 * GIB)
    header = replace(four_b(), types={"token_embd.weight": NO_ROWS})
    plan = plan_memory(EngineSettings(model=FILE, speculation="off"), header)
    assert plan.embedding_on is None
    assert plan.usages[-1].weights == 500 * MIB


def test_a_copy_of_the_token_embedding_is_the_first_to_go(card: Any) -> None:
    card(5 * GIB // 2, 5 * GIB // 2)
    plan = four_b_plan(speculation="off", split_mode="layer")
    assert not plan.settings.offload_embedding
    assert plan.embedding_on is None
    assert plan.usages[-1].weights == 500 * MIB


def test_layers_are_shared_out_by_free_memory(card: Any) -> None:
    card(12 * GIB, 4 * GIB)
    plan = four_b_plan(split_mode="layer", ctx_size=16_384, speculation="both")
    assert plan.settings.tensor_split == "12.0,4.0"
    first, second, host = plan.usages
    # 33 layers, one of them the MTP head's, and the output as one more: 26 and 8
    assert first.weights == 26 * 70 * MIB + 500 * MIB  # the embedding, beside the first layer
    assert second.weights == 7 * 70 * MIB + 500 * MIB + 10240
    assert (first.kv, second.kv) == (6 * 16_384 * 4096, 2 * 16_384 * 4096 + 16_384 * 4 * 1024)
    assert first.states + second.states == (8 + 8 + 32 + plan.settings.snapshots) * plan.spec.state
    assert (host.weights, host.kv, host.states) == (0, 0, 0)
    assert "CUDA1" in str(plan)


def test_a_model_too_large_for_one_card_fits_on_two(card: Any) -> None:
    card(5 * GIB // 2, 5 * GIB // 2)
    with pytest.raises(DoesNotFit, match="CUDA0"):
        four_b_plan(speculation="off")
    assert four_b_plan(speculation="off", split_mode="layer").fits


@pytest.mark.parametrize("share", ["1,3", "0,1", "1, 1"])
def test_shares_are_as_given(card: Any, share: str) -> None:
    card(20 * GIB, 20 * GIB)
    plan = four_b_plan(split_mode="layer", tensor_split=share, ctx_size=4096, speculation="off")
    first = {"1,3": 9, "0,1": 0, "1, 1": 17}[share]
    assert plan.usages[0].weights == first * 70 * MIB + (500 * MIB if first else 0)


def test_shares_are_one_for_each_gpu(card: Any) -> None:
    card(20 * GIB, 20 * GIB)
    with pytest.raises(ModelLoadError, match="there are 2 GPUs"):
        four_b_plan(split_mode="layer", tensor_split="1,1,1")


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"split_mode": "layer", "tensor_split": "a,b"}, "numbers of at least 0"),
        ({"split_mode": "layer", "tensor_split": "0,0"}, "numbers of at least 0"),
        ({"split_mode": "layer", "tensor_split": "1,-1"}, "numbers of at least 0"),
        ({"tensor_split": "1,1"}, "needs split_mode"),
        ({"split_mode": "layer", "main_gpu": 1}, "leave main_gpu out"),
        ({"split_mode": "row"}, "'none' or 'layer'"),
    ],
)
def test_a_split_that_makes_no_sense_is_refused(changes: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        EngineSettings(model=FILE, **changes)


def test_the_engine_refuses_before_it_loads(nano_f16: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "available_memory", lambda: 400 * MIB)
    with pytest.raises(DoesNotFit, match=r"CPU: .* are missing") as caught:
        Engine(settings(nano_f16, ctx_size=262_144, speculation="off"))
    assert "ctx_size=" in str(caught.value)


def test_a_context_that_llama_cpp_refuses_is_reported(
    nano_f16: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise LlamaError("failed to allocate compute pp buffers")

    monkeypatch.setattr("qwen_serve.server.engine.loading.Context", refuse)
    with pytest.raises(DoesNotFit, match=r"(?s)failed to allocate.*lower ctx_size \(2048\).*The plan was"):
        Engine(settings(nano_f16))


def test_missing_metadata_is_named() -> None:
    incomplete = {key: value for key, value in FOUR_B.items() if "context_length" not in key}
    with pytest.raises(ModelLoadError, match=r"qwen35\.context_length"):
        ModelSpec.from_header(Header(FOUND, incomplete, {}))


def test_a_log_that_tells_no_buffers_is_an_error(
    nano_q4_k_m: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Words of another llama.cpp, in which a plan of 0 bytes fits anywhere; nor is that remembered."""
    monkeypatch.setenv("QWEN_SERVE_CACHE", str(tmp_path))
    other = re.compile(r"(\S+)\s+(compute|output) buffer: ([0-9.]+) MiB")
    wanted, header = decide(EngineSettings(model=nano_q4_k_m)), read_header(nano_q4_k_m)
    with monkeypatch.context() as changed:
        changed.setattr(memory, "_BUFFER", other)
        with pytest.raises(ModelLoadError, match=r"the model's context are: no line like 'CPU compute"):
            plan_memory(wanted, header)
    assert not [*tmp_path.glob("measured/*")]
    right = [usage.compute for usage in plan_memory(wanted, header).usages]
    [record] = tmp_path.glob("measured/*")
    record.write_text('{"sizes": {}}')  # as an earlier server may have left it
    assert [usage.compute for usage in plan_memory(wanted, header).usages] == right
    assert min(right) > 0


@pytest.mark.parametrize(
    "lines", [[], ["CPU output buffer size = 1.00 MiB"], ["CPU compute buffer size = 0.00 MiB"]]
)
def test_each_context_has_a_compute_buffer(lines: list[str]) -> None:
    with pytest.raises(ModelLoadError, match="of the head are"):
        memory.reported(lines, "the head")
    more = [*lines, "graph_reserve:      CUDA0 compute buffer size =   2.50 MiB"]
    assert memory.reported(more, "the head")["CUDA0"] == int(2.5 * MIB)
