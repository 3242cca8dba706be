"""Counters are read from Prometheus' text, and their growth becomes rows of steps and drafts."""

from pathlib import Path

import pytest

from qwen_serve.bench.load.counters import counted, growth, parse_counters, record_growth
from qwen_serve.bench.store import Run

BEFORE = """
# TYPE qwen_steps counter
qwen_steps_total{kind="decode",rows="8"} 2.0
# TYPE qwen_step_tokens counter
qwen_step_tokens_total{kind="decode",rows="8"} 10.0
# TYPE qwen_sampler_changes counter
qwen_sampler_changes_total 3.0
"""
AFTER = """
# TYPE qwen_steps counter
qwen_steps_total{kind="decode",rows="8"} 12.0
qwen_steps_total{kind="verify",rows="4"} 0.0
# TYPE qwen_step_tokens counter
qwen_step_tokens_total{kind="decode",rows="8"} 80.0
# TYPE qwen_step_seconds counter
qwen_step_seconds_total{kind="decode",phase="receive",rows="8"} 0.001
qwen_step_seconds_total{kind="decode",phase="sample",rows="8"} 0.002
qwen_step_seconds_total{kind="decode",phase="propose",rows="8"} 0.006
qwen_step_seconds_total{kind="decode",phase="decode",rows="8"} 0.004
qwen_step_seconds_total{kind="decode",phase="wait",rows="8"} 0.01
qwen_step_seconds_total{kind="decode",phase="overlapped",rows="8"} 0.008
# TYPE qwen_sampler_changes counter
qwen_sampler_changes_total 3.0
# TYPE qwen_drafted_tokens counter
qwen_drafted_tokens_total{drafter="mtp"} 8.0
# TYPE qwen_accepted_draft_tokens counter
qwen_accepted_draft_tokens_total{drafter="mtp"} 6.0
# TYPE qwen_drafts_failed counter
qwen_drafts_failed_total{drafter="mtp"} 1.0
# TYPE qwen_drafter_active gauge
qwen_drafter_active{drafter="mtp"} 1.0
"""


def test_what_grew_becomes_rows() -> None:
    grown = growth(parse_counters(BEFORE), parse_counters(AFTER))
    steps, drafts = counted(grown, "random, 8 concurrent")
    assert steps[:2] == ("steps", "random, 8 concurrent, decode, 8 rows")
    assert steps[2] == pytest.approx(
        {
            "steps": 10,
            "step_tokens": 70,
            "draft_time": 6,
            "host_time": 3,
            "device_time": 14,
            "overlapped_time": 8,
        }
    )
    assert drafts == (
        "drafts",
        "random, 8 concurrent, mtp",
        {"drafted_tokens": 8.0, "accepted_tokens": 6.0, "drafts_failed": 1.0},
    )


def test_a_server_that_does_not_count_adds_nothing(tmp_path: Path) -> None:
    with Run.begin(tmp_path, "peers", settings={}) as run:
        record_growth(run, "x", "random", "1 concurrent", 1, {}, parse_counters(AFTER))
        record_growth(run, "x", "random", "1 concurrent", 1, parse_counters(BEFORE), {})
        assert not len(run.results().frame)
        record_growth(run, "x", "random", "1 concurrent", 1, parse_counters(BEFORE), parse_counters(AFTER))
        assert set(run.results().frame["workload"]) == {"steps", "drafts"}
