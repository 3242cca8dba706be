"""From settings to a running engine: clean-up after failures, and the engine's counts."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from time import sleep

import pytest

from qwen_serve.llamacpp import Context, Model
from qwen_serve.llamacpp.errors import LlamaError, ModelLoadError
from qwen_serve.llamacpp.gguf import read_header
from qwen_serve.server.engine import DoesNotFit
from qwen_serve.server.engine.batch import Batch
from qwen_serve.server.engine.loading import PREFILL_CPU, build_engine, resolve_settings
from qwen_serve.server.engine.model_file import ModelFile
from qwen_serve.server.engine.planning.fit import plan_memory
from qwen_serve.server.engine.planning.vision import VisionSpec
from qwen_serve.server.engine.prefill_budget import MIN_PREFILL
from qwen_serve.server.engine.profile import StartProfile, StepProfile
from qwen_serve.server.engine.runner import Launched
from tests.server.engine.helpers import Question, ask_all, running, settings
from tests.server.engine.inside import policy


def watch_closing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record what is freed from now on, in order."""
    names: list[str] = []
    for kind in (Context, Model):

        def close(self: Context | Model, close: object = kind.close, name: str = kind.__name__) -> None:
            names.append(name)
            assert callable(close)
            close(self)

        monkeypatch.setattr(kind, "close", close)
    return names


def test_a_head_that_does_not_fit_leaves_nothing_behind(
    nano_q4_k_m: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_memory(resolve_settings(settings(nano_q4_k_m, speculation="both")), read_header(nano_q4_k_m))

    def refuse(*_: object) -> None:
        raise LlamaError("no memory for the head")

    closed = watch_closing(monkeypatch)
    monkeypatch.setattr("qwen_serve.server.engine.loading.MtpContext", refuse)
    with pytest.raises(DoesNotFit, match="no memory for the head"):
        build_engine(plan, StepProfile(), StartProfile())
    assert closed == ["Context", "Model"], "a model must outlive its contexts"


def test_a_vision_tower_that_cannot_be_loaded_leaves_nothing_behind(
    nano_q4_k_m: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = read_header(nano_q4_k_m)
    plan = plan_memory(resolve_settings(settings(nano_q4_k_m, speculation="off")), header)
    tower = VisionSpec(ModelFile.of(header.path, header.status), weights=1, compute=1, products=0, side=32)
    closed = watch_closing(monkeypatch)
    with pytest.raises(ModelLoadError, match="mmproj: "):
        build_engine(replace(plan, spec=replace(plan.spec, vision=tower)), StepProfile(), StartProfile())
    assert closed == ["Context", "Model"]


def test_the_head_drafts_by_itself_on_a_gpu_only(nano_q4_k_m: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu = settings(nano_q4_k_m, n_gpu_layers=-1)
    assert resolve_settings(on_a_gpu).speculation == "ngram"
    monkeypatch.setattr("qwen_serve.server.engine.loading.supports_gpu", lambda: True)
    assert resolve_settings(on_a_gpu).speculation == "both"
    assert resolve_settings(settings(nano_q4_k_m)).speculation == "ngram", "no layers are there"
    assert resolve_settings(on_a_gpu.replace(speculation="mtp")).speculation == "mtp"


def test_the_warm_up_measures_the_budget_that_is_left_open(
    nano_q4_k_m: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = resolve_settings(
        settings(nano_q4_k_m, speculation="off", ubatch_size=64, prefill_seconds=10.0, remember=False)
    )
    plan = plan_memory(wanted, read_header(nano_q4_k_m))
    parts = build_engine(plan, StepProfile(), StartProfile())
    parts.warm_up()
    assert parts.scheduler.prefill_budget.tokens == PREFILL_CPU, "without a GPU no more than that"
    parts.close()
    parts = build_engine(replace(plan, usages=plan.usages * 2), StepProfile(), StartProfile())  # as on a GPU
    with caplog.at_level(logging.DEBUG):
        parts.warm_up()
    tokens = parts.scheduler.prefill_budget.tokens
    assert tokens in range(64, 2048 + 1, 64)
    assert f"a step reads up to {tokens} prompt tokens, " in caplog.text
    monkeypatch.setattr("qwen_serve.server.engine.warmup.time_prompt", lambda *_: 1000.0)
    parts.warm_up()
    assert parts.scheduler.prefill_budget.tokens == MIN_PREFILL, "it is slow"
    parts.close()


def test_without_a_gpu_steps_are_compared_by_what_they_compute(
    nano_q4_k_m: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else holds them up, such as another program on the same cores, says nothing of rows."""
    wanted = resolve_settings(settings(nano_q4_k_m, speculation="ngram", prefill_budget=64, remember=False))
    parts = build_engine(plan_memory(wanted, read_header(nano_q4_k_m)), StepProfile(), StartProfile())
    launch = parts.runner.launch

    def held_up(batch: Batch, behind: Launched | None = None) -> Launched:
        sleep(0.02)  # something else has the cores
        return launch(batch, behind)

    monkeypatch.setattr(parts.runner, "launch", held_up)
    parts.warm_up()
    times = policy(parts.speculator).times
    assert 0 < times.of(1, 1) < 0.02
    parts.close()


def test_a_budget_that_is_given_stays(nano_q4_k_m: Path) -> None:
    with running(nano_q4_k_m, prefill_budget=7) as engine:
        assert engine.components.scheduler.prefill_budget.tokens == 7


def test_counts_of_drafts_are_a_snapshot(nano_q4_k_m: Path) -> None:
    with running(nano_q4_k_m, speculation="mtp", draft_always=True) as engine:
        before = engine.stats()
        asyncio.run(ask_all(engine, [Question([300, 301] * 20, 20)]))
        after = engine.stats()
    assert sum(counts.drafted for counts in before.drafts.values()) == 0
    assert sum(counts.drafted for counts in after.drafts.values()) > 0
