"""LoRA adapters in the engine: a step has one selection of adapters, prefixes are separate, files are
checked."""

import asyncio
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from qwen_serve.convert import cli
from qwen_serve.llamacpp import HAS_BATCH_INVARIANCE
from qwen_serve.llamacpp.gguf import read_header
from qwen_serve.server.engine import (
    Adapters,
    Engine,
    GenerateRequest,
    Generation,
    ModelLoadError,
    SamplingParams,
)
from qwen_serve.server.engine.adapters import TURN
from qwen_serve.server.engine.planning.adapters import AdapterSpec
from qwen_serve.server.engine.scheduling_policy import SchedulingPolicy
from tests.adapters import merge, write_adapter
from tests.conftest import NANO
from tests.server.engine.helpers import EXACT, Question, random_prompt, running, standing_still, told
from tests.server.engine.scheduling import advance, commit, scheduler, sequence

PROMPT = list(range(300, 340))
SELECTIONS: list[Adapters] = [(), ((0, 1.0),), ((1, 1.0),), ((0, -1.0),), ((0, 1.0), (1, 0.5))]


def converted(folder: Path) -> Path:
    assert cli.main(["--src", str(folder), "--base", str(NANO), "--out", str(folder.parent)]) == 0
    return folder.with_name(f"{folder.name}-F32.gguf")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two adapters of every projection, large enough to change answers."""
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / name, NANO, seed=seed, size=0.4) for seed, name in enumerate("ab")]


@pytest.fixture(scope="module")
def loras(folders: list[Path]) -> list[Path]:
    return [converted(folder) for folder in folders]


def named(loras: list[Path]) -> str:
    return ",".join(f"{path.stem[0]}={path}" for path in loras)


def submit(engine: Engine, adapters: Adapters, tokens: int = 16) -> Generation:
    params = SamplingParams(ignore_eos=True)
    return engine.submit(GenerateRequest(engine.prompt(PROMPT), params, tokens, adapters=adapters))


async def answer(generation: Generation) -> list[int]:
    return [token async for new in generation for token in new]


def test_a_request_is_answered_in_company_as_alone(nano_f32: Path, loras: list[Path]) -> None:
    """With drafts by a head without adapters, and with states that are not shared between adapters."""

    async def compare(engine: Engine) -> None:
        alone = []
        for adapters in SELECTIONS:
            generation = submit(engine, adapters)
            alone.append(await answer(generation))
            assert generation.request.cached_tokens == 0, adapters
        assert len({tuple(tokens) for tokens in alone}) == len(SELECTIONS)
        with standing_still(engine):
            generations = [submit(engine, adapters) for adapters in [*SELECTIONS, *SELECTIONS]]
        together = list(await asyncio.gather(*map(answer, generations)))
        assert together == [*alone, *alone]
        assert all(generation.request.cached_tokens == len(PROMPT) - 1 for generation in generations)

    drafts: dict[str, Any] = {"speculation": "both", "draft_always": True}
    with running(nano_f32, lora=named(loras), parallel=5, ctx_size=4096, **EXACT, **drafts) as engine:
        asyncio.run(compare(engine))
        assert (
            engine.plan.usages[-1].parts["LoRA adapters"] > sum(path.stat().st_size for path in loras) * 0.9
        )
        assert sum(stats.drafted for stats in engine.stats().drafts.values()) > 0


@pytest.mark.slow
def test_every_mix_is_answered_as_by_fresh_prefills(nano_f32: Path, loras: list[Path]) -> None:
    """With shared beginnings, too few cells for all, drafts, states in host memory, and some who leave."""
    rng = random.Random(0)
    stems = [[rng.randrange(300, 3000) for _ in range(150)] for _ in range(2)]
    asked = []
    for _ in range(24):
        prompt = [*rng.choice(stems)[: rng.randrange(40, 150)], *(rng.randrange(3000) for _ in range(9))]
        asked.append((prompt, rng.choice(SELECTIONS), rng.randrange(4, 40)))

    async def one(engine: Engine, prompt: list[int], adapters: Adapters, tokens: int) -> list[int]:
        params = SamplingParams(ignore_eos=True)
        return await answer(
            engine.submit(GenerateRequest(engine.prompt(prompt), params, tokens, adapters=adapters))
        )

    async def alone(engine: Engine) -> list[list[int]]:
        return [await one(engine, *request) for request in asked]

    async def together(engine: Engine) -> list[list[int]]:
        answers: list[list[int]] = []
        for start in (0, 8, 16):
            leaving = submit(engine, rng.choice(SELECTIONS))
            part = asyncio.gather(*(one(engine, *request) for request in asked[start : start + 8]))
            leaving.cancel()
            answers += await part
        return answers

    with running(nano_f32, lora=named(loras), prefix_cache=False, speculation="off", **EXACT) as engine:
        wanted = asyncio.run(alone(engine))
    options: dict[str, Any] = {
        "ctx_size": 768,
        "prefix_cells": 256,
        "prefix_host_mib": 64,
        "draft_always": True,
    }
    with running(nano_f32, lora=named(loras), speculation="both", **options, **EXACT) as engine:
        assert asyncio.run(together(engine)) == wanted
        assert engine.stats().prefix.hits > 0


@pytest.mark.slow
@pytest.mark.skipif(not HAS_BATCH_INVARIANCE, reason="llama.cpp is built without batch-invariant")
@pytest.mark.parametrize("at_once", [1, 8])
async def test_deterministic_answers_have_the_same_bits_in_company(
    nano_q4_k_m: Path, loras: list[Path], at_once: int
) -> None:
    """In a quantized model, with drafts and kept states: as each request alone without them."""
    rng = random.Random(at_once)
    asked = []
    for number in range(15):
        text = random_prompt(rng, rng.randrange(5, 150))
        params = SamplingParams(ignore_eos=True, logprobs=2)
        if number % 2:
            params = replace(params, temperature=1.0, top_k=20, seed=number)
        asked.append(Question(text * 2, 20, params=params, adapters=SELECTIONS[number % len(SELECTIONS)]))
    options: dict[str, Any] = {"lora": named(loras), "deterministic": True, "parallel": 8}
    options |= {"ctx_size": 8 * 512, "prefix_checkpoints": 64}
    with running(nano_q4_k_m, **options, speculation="off", prefix_cache=False) as engine:
        alone = [await told(engine, request) for request in asked]
    with running(nano_q4_k_m, **options, speculation="ngram", draft_always=True) as engine:
        reproducible = engine.components.scheduler.reproducible
        assert reproducible is not None
        assert not reproducible.alone
        for _ in range(2):
            for start in range(0, len(asked), at_once):
                part = asked[start : start + at_once]
                found = await asyncio.gather(*(told(engine, request) for request in part))
                assert found == alone[start : start + at_once]
        stats = engine.stats()
        assert stats.prefix.hits > 0
        assert sum(drafts.accepted for drafts in stats.drafts.values()) > 0


@pytest.mark.slow
def test_answers_are_those_of_the_merged_checkpoint(
    nano_f32: Path, folders: list[Path], loras: list[Path], tmp_path: Path
) -> None:
    with running(nano_f32, lora=named(loras), **EXACT) as engine:
        found = asyncio.run(_first(engine, ((0, 1.0), (1, 0.5))))
    merged = merge(tmp_path / "merged", NANO, {folders[0]: 1.0, folders[1]: 0.5})
    arguments = ["--src", merged, "--out", tmp_path, "--quant", "F32", "--no-vision", "--no-kld"]
    assert cli.main([*map(str, arguments)]) == 0
    with running(tmp_path / "merged-F32.gguf", **EXACT) as engine:
        assert asyncio.run(_first(engine, ())) == found


async def _first(engine: Engine, adapters: Adapters) -> list[int]:
    return await answer(submit(engine, adapters))


@pytest.mark.slow
def test_the_prefix_file_knows_an_adapter_by_its_file(
    nano_f32: Path, loras: list[Path], tmp_path: Path
) -> None:
    """Under another name and number it is the same; of another with that number nothing is found."""
    kept: dict[str, Any] = {"prefix_file": tmp_path / "prefixes", **EXACT}
    long = PROMPT * 5

    async def cached(engine: Engine, adapters: Adapters) -> int:
        generation = engine.submit(
            GenerateRequest(engine.prompt(long), SamplingParams(ignore_eos=True), 4, adapters=adapters)
        )
        await answer(generation)
        return generation.request.cached_tokens

    with running(nano_f32, lora=named(loras), **kept) as engine:
        assert asyncio.run(cached(engine, ((0, 1.0),))) == 0
    with running(nano_f32, lora=f"other={loras[1]},same={loras[0]}", **kept) as engine:
        assert asyncio.run(cached(engine, ((0, 1.0),))) == 0
        assert asyncio.run(cached(engine, ((1, 1.0),))) > 0
        assert asyncio.run(cached(engine, ((1, 0.5),))) == 0
        assert asyncio.run(cached(engine, ())) == 0


def test_who_has_the_same_adapters_is_in_a_step_and_others_take_turns() -> None:
    s = scheduler(slots=6, batch=64, budget=64)
    group: list[Adapters] = [(), ((0, 1.0),), (), ((1, 1.0),), ((0, 1.0),), ()]
    for adapters in group:
        one = sequence(4, max_tokens=40)
        one.adapters = adapters
        s.add(one)
    turns: list[Adapters] = []
    while s.running or s.waiting:
        batch = s.schedule()
        assert {chunk.sequence.adapters for chunk in batch.chunks} == {batch.adapters}
        turns.append(batch.adapters)
        commit(s, batch)
    assert [turns[i * TURN] for i in range(6)] == [(), ((0, 1.0),), ((1, 1.0),)] * 2
    assert all(len(set(turns[i * TURN : (i + 1) * TURN])) == 1 for i in range(6))


def test_new_ones_come_behind_those_who_wait() -> None:
    """Each selection gets its turn, however many there are."""
    s = scheduler(slots=3, batch=64, budget=64)

    def add(adapters: Adapters, tokens: int) -> None:
        one = sequence(4, max_tokens=tokens)
        one.adapters = adapters
        s.add(one)

    add((), 40)
    steps = waited = 0
    while any(not one.adapters for one in [*s.running, *s.waiting]) or not steps:
        if len(s.running) + len(s.waiting) < 3:
            add(((0, float(steps + 1)),), 2)
        batch = s.schedule()
        waited = 0 if not batch.adapters else waited + 1
        assert waited <= 3 * TURN
        commit(s, batch)
        steps += 1


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_a_tenant_with_many_scales_has_no_more_turns_than_one_with_a_single_set(
    policy: SchedulingPolicy,
) -> None:
    """One tenant uses a new scale in each request and always has seven of them running."""
    s = scheduler(slots=8, batch=64, budget=64, policy=policy)
    turns = Counter[str]()

    def add(tenant: str, adapters: Adapters, tokens: int) -> None:
        one = sequence(4, max_tokens=tokens, tenant=tenant)
        one.adapters = adapters
        s.add(one)

    add("modest", ((0, 1.0),), 10_000)
    for step in range(60 * TURN):
        while len(s.running) + len(s.waiting) < 8:
            add("greedy", ((0, 2.0 + step + len(s.waiting) / 8),), 20)
        batch = advance(s)
        turns.update(chunk.sequence.scheduling.tenant for chunk in batch.chunks)
    assert turns["modest"] >= 0.45 * turns.total()


def test_who_shares_a_set_shares_its_turn() -> None:
    """It counts as a turn of each: sharing it with many others gains or loses nobody anything."""
    s = scheduler(slots=4, batch=64, budget=64)
    for tenant, scale in [("a", 1.0), ("b", 1.0), ("c", 1.0), ("d", 2.0)]:
        one = sequence(4, max_tokens=1000, tenant=tenant)
        one.adapters = ((0, scale),)
        s.add(one)
    scales = [advance(s).adapters[0][1] for _ in range(10 * TURN)]
    assert scales == ([1.0] * TURN + [2.0] * TURN) * 5


# --- files -------------------------------------------------------------------------------------------------


def write(path: Path, tensors: dict[str, tuple[int, ...]], **changes: str) -> Path:
    """Write a file of tensors with numpy's shapes."""
    writer = gguf.GGUFWriter(path, changes.get("arch", "qwen35"))
    writer.add_type(changes.get("kind", "adapter"))
    writer.add_string("adapter.type", changes.get("type", "lora"))
    writer.add_float32("adapter.lora.alpha", 16)
    for name, shape in tensors.items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def pair(name: str, rows: int, columns: int, rank: int = 8) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight.lora_a": (rank, columns), f"{name}.weight.lora_b": (rows, rank)}


GOOD = pair("blk.0.attn_qkv", 512, 256)


@pytest.mark.parametrize(
    ("tensors", "changes", "said"),
    [
        (GOOD, {"kind": "model"}, "is no LoRA adapter"),
        (GOOD, {"type": "ia3"}, "is no LoRA adapter"),
        (GOOD, {"arch": "llama"}, "for architecture 'llama', the model's is 'qwen35'"),
        (pair("blk.0.attn_qkv", 512, 128), {}, "is another model's: A and B of blk.0.attn_qkv.weight"),
        (pair("blk.0.attn_qkv", 100, 256), {}, "is another model's"),
        (pair("blk.0.attn_q", 512, 256), {}, "this one has no blk.0.attn_q.weight"),
        (pair("blk.8.attn_q", 512, 256), {}, "of the MTP head"),
        (pair("token_embd", 256, 3712), {}, "which is the model's head, too"),
        (pair("blk.0.ssm_conv1d", 512, 4), {}, "llama.cpp does not apply tensor"),
        (GOOD | {"blk.0.attn_norm.weight": (256,)}, {}, "llama.cpp does not apply tensor"),
        ({"blk.0.attn_qkv.weight.lora_a": (8, 256)}, {}, "has no lora_b"),
        ({"blk.0.attn_qkv.weight.lora_b": (512, 8)}, {}, "has no lora_a"),
        ({}, {}, "holds no tensor"),
    ],
)
def test_a_file_that_is_no_adapter_of_the_model(
    nano_f32: Path, tmp_path: Path, tensors: dict[str, tuple[int, ...]], changes: dict[str, str], said: str
) -> None:
    rows = read_header(nano_f32).tensors["blk.0.attn_qkv.weight"].shape[1]
    fitting = {
        name: (rows, 8) if shape == (512, 8) and "qkv" in name else shape for name, shape in tensors.items()
    }
    path = write(tmp_path / "adapter.gguf", fitting, **changes)
    with pytest.raises(ModelLoadError, match=said):
        AdapterSpec.from_header("mine", read_header(path, "lora"), read_header(nano_f32), 8)


def test_a_file_that_is_one(nano_f32: Path, loras: list[Path]) -> None:
    spec = AdapterSpec.from_header("mine", read_header(loras[0], "lora"), read_header(nano_f32), 8)
    assert sorted(spec.blocks) == [*range(8)]
