"""From settings to a running engine: what is left behind when that fails, what its counts are."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest

from server.engine import DoesNotFit
from server.engine.errors import LlamaError
from server.engine.gguf import read_header
from server.engine.llama import Context, Model
from server.engine.loading import decide, load, warm_up
from server.engine.memory import plan_memory
from server.engine.vocab import Vocab
from server.engine.warmup import STANDSTILL, prompt_tokens
from tests.server.engine.helpers import Request, ask_all, running, settings

if TYPE_CHECKING:
    from pathlib import Path

    from server.engine.runner import Runner


def test_a_head_that_does_not_fit_leaves_nothing_behind(
    nano_q4_k_m: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_memory(decide(settings(nano_q4_k_m, speculation="both")), read_header(nano_q4_k_m))
    closed: list[str] = []

    def refuse(*_: object) -> None:
        raise LlamaError("no memory for the head")

    for kind in (Context, Model):

        def close(self: Context | Model, close: object = kind.close, name: str = kind.__name__) -> None:
            closed.append(name)
            assert callable(close)
            close(self)

        monkeypatch.setattr(kind, "close", close)
    monkeypatch.setattr("server.engine.loading.MtpContext", refuse)
    with pytest.raises(DoesNotFit, match="no memory for the head"):
        load(plan)
    assert closed == ["Context", "Model"], "a model must outlive its contexts"


@pytest.mark.parametrize(
    ("seconds", "one_pass", "most", "tokens"),
    [
        (STANDSTILL / 3.9, 2048, 8192, 3 * 2048),
        (STANDSTILL / 100, 2048, 8192, 8192),
        (STANDSTILL / 100, 2048, 7000, 3 * 2048),
        (STANDSTILL, 2048, 8192, 2048),
        (10 * STANDSTILL, 2048, 8192, 2048),
        (10 * STANDSTILL, 512, 100, 100),
    ],
)
def test_a_step_reads_the_passes_of_half_a_second(
    seconds: float, one_pass: int, most: int, tokens: int
) -> None:
    assert prompt_tokens(seconds, one_pass, most) == tokens


def test_a_budget_that_is_left_open_is_measured_on_a_gpu_only(
    nano_q4_k_m: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert decide(settings(nano_q4_k_m)).prefill_budget == 128
    monkeypatch.setattr("server.engine.loading.supports_gpu", lambda: True)
    assert decide(settings(nano_q4_k_m)).prefill_budget == 128, "no layers are on the GPU"
    assert decide(settings(nano_q4_k_m, n_gpu_layers=-1)).prefill_budget == 0
    assert decide(settings(nano_q4_k_m, n_gpu_layers=-1, prefill_budget=7)).prefill_budget == 7


def test_the_head_drafts_by_itself_on_a_gpu_only(nano_q4_k_m: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu = settings(nano_q4_k_m, n_gpu_layers=-1)
    assert decide(on_a_gpu).speculation == "ngram"
    monkeypatch.setattr("server.engine.loading.supports_gpu", lambda: True)
    assert decide(on_a_gpu).speculation == "both"
    assert decide(settings(nano_q4_k_m)).speculation == "ngram", "no layers are there"
    assert decide(on_a_gpu.replace(speculation="mtp")).speculation == "mtp"


def test_the_warm_up_counts_in_whole_passes(nano_q4_k_m: Path, caplog: pytest.LogCaptureFixture) -> None:
    wanted = decide(settings(nano_q4_k_m, speculation="off", ubatch_size=64))
    plan = plan_memory(wanted, read_header(nano_q4_k_m))
    loaded = load(plan)
    vocab, no_runner = Vocab(loaded.model), cast("Runner", None)
    assert warm_up(plan, loaded.context, vocab, no_runner, None) == 0, "it was 128 already"
    left_open = plan.settings.replace(prefill_budget=0)
    as_on_a_gpu = replace(plan, settings=left_open, usages=plan.usages * 2)
    with caplog.at_level(logging.INFO):
        tokens = warm_up(as_on_a_gpu, loaded.context, vocab, no_runner, None)
    loaded.close()
    assert tokens in range(64, 2048 + 1, 64)
    assert f"a step reads up to {tokens} prompt tokens: 64 took" in caplog.text


@pytest.mark.parametrize(("measured", "most"), [(0, (128, 2048)), (512, (512, 512))])
def test_the_warm_up_sets_the_pace(
    nano_q4_k_m: Path, monkeypatch: pytest.MonkeyPatch, measured: int, most: tuple[int, int]
) -> None:
    if measured:
        monkeypatch.setattr("server.engine.engine.warm_up", lambda *_: measured)
    with running(nano_q4_k_m) as engine:
        scheduler = engine._scheduler
        assert (scheduler._prefill_budget, scheduler._most_prefill) == most


def test_counts_of_drafts_are_a_snapshot(nano_q4_k_m: Path) -> None:
    with running(nano_q4_k_m, draft_always=True) as engine:
        before = engine.stats()
        asyncio.run(ask_all(engine, [Request([300, 301] * 20, 20)]))
        after = engine.stats()
    assert sum(counts.drafted for counts in before.drafts.values()) == 0
    assert sum(counts.drafted for counts in after.drafts.values()) > 0
