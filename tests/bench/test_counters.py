"""Counters are read from Prometheus' text, and their growth is what a stretch of work did."""

from bench.counters import add, growth, parse_counters

TEXT = """
# HELP qwen_steps_total Steps
# TYPE qwen_steps_total counter
qwen_steps_total 12.0
qwen_phase_seconds_total{phase="decode",rows="1"} 1.5e-01
qwen_phase_seconds_total{phase="a \\"b\\" c"} 2
qwen_running_sequences 3.0
qwen_request_seconds_bucket{le="0.1"} 4.0
qwen_request_seconds_sum 0.25
qwen_request_seconds_count 4.0
"""


def test_parse() -> None:
    assert parse_counters(TEXT) == {
        "qwen_steps_total": 12.0,
        'qwen_phase_seconds_total{phase="decode",rows="1"}': 0.15,
        'qwen_phase_seconds_total{phase="a \\"b\\" c"}': 2.0,
        "qwen_request_seconds_sum": 0.25,
        "qwen_request_seconds_count": 4.0,
    }


def test_growth() -> None:
    before = {"a_total": 1.0, "b_total": 2.0}
    after = {"a_total": 4.0, "b_total": 2.0, "c_total": 0.5}
    assert growth(before, after) == {"a_total": 3.0, "c_total": 0.5}
    assert add({"a_total": 3.0}, {"a_total": 1.0, "c_total": 0.5}) == {"a_total": 4.0, "c_total": 0.5}
