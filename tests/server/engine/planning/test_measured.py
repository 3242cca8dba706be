"""A start's measurements are reused by the next one, unless something changed."""

import asyncio
import logging
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_serve.llamacpp.errors import ModelLoadError
from qwen_serve.llamacpp.gguf import read_header
from qwen_serve.server.engine.loading import PREFILL_CPU, resolve_settings
from qwen_serve.server.engine.planning import measured
from qwen_serve.server.engine.planning.fit import plan_memory
from qwen_serve.server.engine.planning.measured import Buffers, Measured, RecordFile
from qwen_serve.server.engine.planning.spec import ModelSpec
from qwen_serve.server.engine.prefill_budget import MIN_PREFILL
from qwen_serve.server.engine.settings import EngineSettings
from qwen_serve.server.engine.speculation.times import StepTimer, StepTimes
from qwen_serve.server.engine.warmup import time_prompt
from tests.server.engine.helpers import Question, ask_all, running


@pytest.fixture
def measurings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Says each time that something is measured; the file is the test's own."""
    monkeypatch.setenv("QWEN_SERVE_CACHE", str(tmp_path))
    done: list[str] = []
    steps = StepTimer.rehearse

    def watched_steps(*arguments: object) -> None:
        done.append("steps")
        steps(*arguments)  # type: ignore[arg-type]

    def watched_prompt(*arguments: object) -> float:
        done.append("prompt")
        return time_prompt(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(StepTimer, "rehearse", watched_steps)
    monkeypatch.setattr("qwen_serve.server.engine.warmup.time_prompt", watched_prompt)
    return done


def test_the_next_start_measures_nothing(
    nano_q4_k_m: Path, measurings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    question = Question([300, 301, 302] * 10, 20)
    with running(nano_q4_k_m, speculation="ngram") as engine:
        first = asyncio.run(ask_all(engine, [question]))
    assert measurings == ["prompt", "steps"]
    with caplog.at_level(logging.INFO), running(nano_q4_k_m, speculation="ngram") as engine:
        assert engine.components.speculator.step_times().ratios
        assert asyncio.run(ask_all(engine, [question])) == first
    assert measurings == ["prompt", "steps"], "once"
    assert "start: plan " in caplog.text


def test_what_steps_have_shown_of_prompts_serves_the_next_start(
    nano_q4_k_m: Path, measurings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that another program slowed down affects only one start."""
    monkeypatch.setattr("qwen_serve.server.engine.warmup.time_prompt", lambda *_: 1000.0)
    changes = {"speculation": "off", "ubatch_size": 32, "prefill_seconds": 10.0}
    with running(nano_q4_k_m, **changes) as engine:
        budget = engine.components.scheduler.prefill_budget
        assert budget.tokens == MIN_PREFILL
        asyncio.run(ask_all(engine, [Question([*range(300, 310)], 1)]))
        assert budget.tokens == MIN_PREFILL, "that says little"
        asyncio.run(ask_all(engine, [Question([*range(400, 450)], 1)]))
        assert budget.tokens == PREFILL_CPU
    with running(nano_q4_k_m, **changes) as engine:
        assert engine.components.scheduler.prefill_budget.tokens == PREFILL_CPU


@pytest.mark.parametrize(
    "changes", [{"parallel": 3}, {"speculation": "off"}, {"ctx_size": 4096}, {"remember": False}]
)
def test_another_setting_is_measured_anew(
    nano_q4_k_m: Path, measurings: list[str], changes: dict[str, object]
) -> None:
    with running(nano_q4_k_m, speculation="ngram"):
        pass
    measurings.clear()
    with running(nano_q4_k_m, **{"speculation": "ngram", **changes}):
        pass
    assert measurings[0] == "prompt"


OLDER = f'{{"prompt_seconds": 0.5, "step_times": {StepTimes().dump().model_dump_json()}}}'
"""As servers before this one left it."""


@pytest.mark.parametrize("damage", ["not JSON", "[]", '{"token_seconds": 7}', OLDER])
def test_a_damaged_file_costs_what_it_would_have_saved(
    nano_q4_k_m: Path, measurings: list[str], tmp_path: Path, damage: str
) -> None:
    with running(nano_q4_k_m, speculation="ngram"):
        pass
    paths = [*(tmp_path / "measured").iterdir()]
    assert len(paths) == 2, "buffers, steps"
    for path in paths:
        path.write_text(damage)
    measurings.clear()
    with running(nano_q4_k_m, speculation="ngram"):
        pass
    assert measurings == ["prompt", "steps"]
    assert damage not in [path.read_text() for path in paths]


def test_a_folder_that_can_not_be_written_costs_nothing(
    nano_q4_k_m: Path, measurings: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QWEN_SERVE_CACHE", str(tmp_path / "file"))
    with running(nano_q4_k_m, speculation="ngram"):
        pass
    assert measurings


def test_each_kind_of_start_has_its_own(
    nano_q4_k_m: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QWEN_SERVE_CACHE", str(tmp_path))
    model = tmp_path / "model.gguf"
    shutil.copy(nano_q4_k_m, model)
    settings, spec = EngineSettings(model=model), ModelSpec.from_header(read_header(model))
    one, more = RecordFile(Measured, settings, spec, []), RecordFile(Measured, settings, spec, [], number=1)
    longer = RecordFile(Measured, settings.replace(ctx_size=4096), spec, [])
    measured = Measured(token_seconds=0.5, step_times=StepTimes().dump())
    one.write(measured)
    assert [file.read() for file in (one, more, longer)] == [measured, None, None]
    assert RecordFile(Buffers, settings, spec, []).read() is None
    assert list((tmp_path / "measured").iterdir()) == [one.path]
    content = bytearray(model.read_bytes())
    content[len(content) // 2] ^= 1
    model.write_bytes(content)
    assert RecordFile(Measured, settings, spec, []).read() == measured, "what was loaded stays what it was"
    spec = ModelSpec.from_header(read_header(model))
    assert RecordFile(Measured, settings, spec, []).read() is None, "of another file"


def test_the_next_start_profiles_nothing(
    nano_q4_k_m: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QWEN_SERVE_CACHE", str(tmp_path))
    settings, header = resolve_settings(EngineSettings(model=nano_q4_k_m)), read_header(nano_q4_k_m)
    plan = plan_memory(settings, header)
    buffers = [usage.compute for usage in plan.usages]
    assert min(buffers) > 0
    monkeypatch.setattr(measured, "load_model", lambda *_, **__: pytest.fail("a profile run"))
    again = plan_memory(settings, header)
    assert ([usage.compute for usage in again.usages], again.settings) == (buffers, plan.settings)
    with pytest.raises(pytest.fail.Exception):
        plan_memory(settings.replace(parallel=3), header)
    with pytest.raises(pytest.fail.Exception):
        plan_memory(settings.replace(remember=False), header)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 20), st.integers(1, 300), st.floats(1e-4, 1.0), st.booleans(), st.booleans()
        ),
        max_size=60,
    )
)
def test_times_come_back_as_they_were(added: list[tuple[int, int, float, bool, bool]]) -> None:
    before, after = StepTimes(), StepTimes()
    for n, rows, seconds, built, captured in added:
        before.add(n, rows, seconds, built=built, captured=captured and not built)
    record = before.dump()
    after.take(type(record).model_validate_json(record.model_dump_json()))
    assert after.dump() == record
    before.take(record)  # answers that were kept for a while are worked out anew
    for n, rows in ((1, 1), (1, 7), (2, 3), (8, 2), (16, 16)):
        assert after.of(n, rows) == before.of(n, rows)
    assert (after.moving, after.leaving) == (before.moving, before.leaving)


def test_a_log_that_tells_no_buffers_is_an_error(
    nano_q4_k_m: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Words of another llama.cpp, in which a plan of 0 bytes fits anywhere; nor is that remembered."""
    monkeypatch.setenv("QWEN_SERVE_CACHE", str(tmp_path))
    other = re.compile(r"(\S+)\s+(compute|output) buffer: ([0-9.]+) MiB")
    wanted, header = resolve_settings(EngineSettings(model=nano_q4_k_m)), read_header(nano_q4_k_m)
    with monkeypatch.context() as changed:
        changed.setattr(measured, "_BUFFER", other)
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
        measured.reported(lines, "the head")
    more = [*lines, "graph_reserve:      CUDA0 compute buffer size =   2.50 MiB"]
    assert measured.reported(more, "the head")["CUDA0"] == int(2.5 * 1024**2)
