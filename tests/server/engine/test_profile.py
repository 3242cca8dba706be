"""Time of steps by phase."""

from itertools import count
from pathlib import Path

import pytest

from qwen_serve.server.engine.batch import Batch
from qwen_serve.server.engine.profile import PHASES, StepProfile

from .helpers import EXACT, Question, ask, running


def test_host_work_while_the_device_computes_is_overlapped(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = count()
    monkeypatch.setattr("qwen_serve.server.engine.profile.perf_counter", lambda: float(next(seconds)))
    profile = StepProfile()
    profile.lap("sample")
    profile.overlaps = True
    for phase in ("fill", "decode", "wait", "sample"):
        profile.lap(phase)
    profile.finish(Batch(n_tokens=1, n_rows=1))
    (totals,) = profile.times()
    spent = dict(zip(PHASES, totals.seconds, strict=True))
    assert {phase: time for phase, time in spent.items() if time} == {
        "sample": 1,
        "decode": 1,
        "wait": 1,
        "overlapped": 2,
    }


@pytest.mark.parametrize("alone", [False, True])
async def test_only_a_device_that_runs_alone_overlaps(nano_f32: Path, alone: bool) -> None:
    with running(nano_f32, **EXACT, sampling="device", speculation="off") as engine:
        engine.components.device_runs_alone = alone
        await ask(engine, Question([5, 6, 7], 20))
        spent = [dict(zip(PHASES, kind.seconds, strict=True)) for kind in engine.stats().step_totals]
    assert any(phases["overlapped"] for phases in spent) is alone
    assert all(phases["reserve"] for phases in spent) is not alone
    assert any(phases["schedule"] for phases in spent), "the first step is not launched ahead"
