"""What /metrics says about the engine."""

from __future__ import annotations

from server.api.metrics import Metrics
from server.engine import EngineStats
from server.engine.prefix_cache import PrefixStats
from server.engine.profile import PHASES, StepProfile


def test_counters_come_from_the_snapshot() -> None:
    profile = StepProfile()
    for rows in (1, 3, 4, 5):
        profile.start()
        for phase in PHASES:
            profile.lap(phase)
        profile.finish("decode", rows, rows)
    stats = EngineStats(
        running=1,
        waiting=2,
        steps=4,
        prompt_tokens=5,
        generated_tokens=6,
        preemptions=7,
        kv_cells_used=8,
        kv_cells=9,
        prefix=PrefixStats(hits=10, resident_cells=11),
        readout_changes=12,
        step_totals=profile.times(),
    )
    metrics = Metrics()
    assert "qwen_steps" not in metrics.render(None).decode()
    text = metrics.render(stats).decode()
    for line in [
        "qwen_preemptions_total 7.0",
        "qwen_readout_changes_total 12.0",
        "qwen_prefix_hits_total 10.0",
        "qwen_prefix_resident_cells 11.0",
        'qwen_steps_total{kind="decode",rows="1"} 1.0',
        'qwen_steps_total{kind="decode",rows="4"} 2.0',
        'qwen_steps_total{kind="decode",rows="8"} 1.0',
        'qwen_step_tokens_total{kind="decode",rows="4"} 7.0',
    ]:
        assert line in text
    for phase in PHASES:
        assert f'qwen_step_seconds_total{{kind="decode",phase="{phase}",rows="1"}}' in text or (
            f'qwen_step_seconds_total{{kind="decode",rows="1",phase="{phase}"}}' in text
        )
