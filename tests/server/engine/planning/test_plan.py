"""The memory plan against llama.cpp's allocations and their devices."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qwen_serve.llamacpp import HAS_STATE_F16, Context, Model, supports_gpu
from qwen_serve.llamacpp.errors import LlamaError
from qwen_serve.llamacpp.gguf import TensorInfo, read_header
from qwen_serve.llamacpp.mtp import MtpContext
from qwen_serve.server.engine import DoesNotFit, Engine, EngineSettings, ModelLoadError
from qwen_serve.server.engine.planning import devices
from qwen_serve.server.engine.planning.contexts import (
    context_options,
    draft_context,
    head_options,
    load_draft,
    uses_mtp,
)
from qwen_serve.server.engine.planning.fit import plan_memory
from qwen_serve.server.engine.planning.sequence_ids import SequenceIds
from tests.server.engine.helpers import settings
from tests.server.engine.planning.cards import FILE, GIB, MIB, NO_ROWS, decided, four_b, four_b_plan

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not supports_gpu(), reason="no GPU, or llama-cpp-python built without CUDA"),
]

F16_STATES = pytest.mark.skipif(not HAS_STATE_F16, reason="llama.cpp has no patch state-f16")


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
        pytest.param({"speculation": "both", "state_type": "f16"}, marks=F16_STATES),
        pytest.param({"speculation": "ngram", "state_type": "f16", "operands": 4}, marks=F16_STATES),
        {"deterministic": True, "ctx_size": 4 * 1000, "flash_attn": "off", "speculation": "off"},
        pytest.param({"n_gpu_layers": -1}, marks=ON_GPU),
        pytest.param({"n_gpu_layers": 5, "ctx_size": 8192}, marks=ON_GPU),
    ],
)
def test_the_plan_is_what_llama_cpp_allocates(
    nano_q4_k_m: Path, nano_draft_q4_k_m: Path, changes: dict[str, Any]
) -> None:
    beside = {"draft_model": nano_draft_q4_k_m} if changes.get("speculation") == "draft" else {}
    wanted = decided(nano_q4_k_m, **changes, **beside)
    plan = plan_memory(wanted, read_header(nano_q4_k_m))
    by_head = uses_mtp(plan.settings, plan.spec)
    assert by_head == (wanted.speculation == "both")
    model = Model(
        nano_q4_k_m,
        n_gpu_layers=wanted.n_gpu_layers,
        embedding_on=plan.embedding_on.name if plan.embedding_on else None,
        use_mmap=False,
        f16_copies=plan.settings.f16_copies == "on",
        load_mtp=by_head,
    )
    assert model.f16_copies == plan.copies
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
    assert gpu.materializing == (2 * state if by_head else 0)
    assert (gpu.compute, host.compute) == (300 * MIB, 20 * MIB)
    assert "NVIDIA A10G" in str(plan)


def test_states_in_f16_take_half(card: Any) -> None:
    card(23 * GIB)
    whole, half = (four_b_plan(state_type=kind, speculation="off") for kind in ("f32", "f16"))
    # a 4B: 24 layers with 32 heads of 128 x 128
    n_states = whole.usages[0].states // whole.spec.state
    assert whole.spec.state_in(whole.settings) - half.spec.state_in(half.settings) == 24 * 32 * 128 * 128 * 2
    assert half.usages[0].states == n_states * half.spec.state_in(half.settings)
    assert "f16, 26" in str(half)


def test_layers_that_stay_on_the_host_keep_their_cache_there(card: Any) -> None:
    card(23 * GIB)
    gpu, host = four_b_plan(n_gpu_layers=10, ctx_size=1024, speculation="off").usages
    # 33 blocks and the head make 34; the last 10 are the head, the MTP block (not loaded) and 8 layers
    assert gpu.weights == (8 * 70 + 500) * MIB + 10240
    assert host.weights == (24 * 70 + 500) * MIB
    assert gpu.kv * 3 == host.kv
    on_host = four_b_plan(n_gpu_layers=0, ctx_size=1024, speculation="off")
    assert on_host.usages[0].weights == (32 * 70 + 500) * MIB + 10240


def test_hidden_states_of_the_head_are_planned(card: Any) -> None:
    card(23 * GIB)
    gpu, host = four_b_plan(speculation="both").usages
    assert (gpu.hidden, host.hidden) == (0, ((8 + 32) * 128 + 2 * 512) * 2560 * 4)
    assert host.total == sum([host.weights, host.compute, host.cells, host.hidden])
    assert four_b_plan(speculation="ngram").usages[1].hidden == 0
    assert re.search(r"hidden states for drafters +- +60.0 MiB", str(four_b_plan(speculation="both")))


@pytest.mark.parametrize(
    ("changes", "slots", "rollback", "checkpoints", "lone"),
    [
        ({}, range(8), range(8, 16), range(16, 48), range(2)),
        ({"speculation": "mtp"}, range(8), range(8, 10), range(10, 42), range(2)),
        ({"speculation": "mtp", "parallel": 1}, range(1), range(1, 2), range(2, 34), range(1)),
        (
            {"speculation": "mtp", "parallel": 64, "draft_parallel": 32},
            range(64),
            range(64, 96),
            range(96, 128),
            range(2),
        ),
        (
            {"speculation": "mtp", "parallel": 64, "draft_parallel": 32, "operands": 4},
            range(64),
            range(64, 66),
            range(66, 98),
            range(2),
        ),
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


def test_the_token_embedding_is_on_the_host_where_that_is_wanted(card: Any) -> None:
    card(23 * GIB)
    gpu, host = four_b_plan(offload_embedding=False, speculation="off").usages
    assert gpu.weights == (32 * 70 + 500) * MIB + 10240
    assert host.weights == 500 * MIB


def test_an_embedding_of_a_type_that_the_gpu_does_not_look_up_is_on_the_host(card: Any) -> None:
    card(23 * GIB)
    header, name = four_b(), "token_embd.weight"
    embedding = TensorInfo(name, (256 * 2**20,), NO_ROWS)
    header = replace(header, tensors={**header.tensors, name: embedding})
    plan = plan_memory(EngineSettings(model=FILE, speculation="off"), header)
    assert plan.embedding_on is None
    assert plan.usages[-1].weights == embedding.n_bytes


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
    monkeypatch.setattr(devices, "available_memory", lambda: 400 * MIB)
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
