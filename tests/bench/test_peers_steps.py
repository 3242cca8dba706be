"""Our server's step counters become means by part of the workload and kind of step."""

from typing import Any

import pytest

from bench.peers_result import Measured, PeersResult
from bench.peers_steps import step_table

COUNTERS = {
    'qwen_steps_total{kind="decode",rows="1"}': 10.0,
    'qwen_steps_total{kind="decode",rows="8"}': 30.0,
    'qwen_step_tokens_total{kind="decode",rows="1"}': 10.0,
    'qwen_step_tokens_total{kind="decode",rows="8"}': 190.0,
    'qwen_step_seconds_total{kind="decode",phase="decode",rows="1"}': 0.1,
    'qwen_step_seconds_total{kind="decode",phase="wait",rows="8"}': 0.3,
    'qwen_step_seconds_total{kind="decode",phase="schedule",rows="8"}': 0.04,
    'qwen_steps_total{kind="verify",rows="4"}': 2.0,
    'qwen_step_tokens_total{kind="verify",rows="4"}': 8.0,
    'qwen_drafted_tokens_total{drafter="ngram"}': 6.0,
    'qwen_drafted_tokens_total{drafter="mtp"}': 2.0,
    'qwen_accepted_draft_tokens_total{drafter="ngram"}': 6.0,
    "qwen_completion_tokens_total": 500.0,
}


def result(**counters: dict[str, float]) -> PeersResult:
    fields: dict[str, Any] = {
        "command": [],
        "url": "",
        "model": None,
        "started": "2026-01-01T00:00:00Z",
        "seconds": 1.0,
        "host": {},
        "card": None,
        "versions": {},
        "workload": "random",
        "gguf": None,
        "gguf_bytes": None,
        "reference": "a",
        "resident": True,
        "settings": {},
        "peers": [],
        "measured": [Measured(peer="a", counters=counters)],
    }
    return PeersResult(**fields)


def test_means() -> None:
    table = step_table(result(part=COUNTERS))
    assert table is not None
    decode, verify = table.rows
    assert decode[:4] == ["a: part", "decode", 40, 5.0]
    assert decode[4:6] == [pytest.approx(10.0), pytest.approx(1.0)]
    assert decode[6] is None
    assert verify == ["a: part", "verify", 2, 4.0, 0.0, 0.0, "75%"]


def test_servers_without_such_counters() -> None:
    assert step_table(result(part={"vllm_steps_total": 3.0})) is None
    assert step_table(result()) is None
