"""A soak sends all kinds of requests, disconnects from some, and reports failures and drift."""

import itertools
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from qwen_serve.bench.cli import main
from qwen_serve.bench.load.soak import drift, drifts
from qwen_serve.bench.store import COLUMNS, Results, load
from tests.bench.fake_server import FakeServer, Script

QUICK = ["--minutes", "0.02", "--window", "0.4", "--concurrency", "3", "--input-tokens", "24"]
QUICK += ["--output-tokens", "8"]


def test_all_kinds_are_sent_and_some_are_given_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(Script(token_delay=0.002)) as server:
        options = ["--url", server.url, "--aborts", "0.3", "--out", str(tmp_path)]
        assert main(["soak", *QUICK, *options]) == 0
        bodies = [body for _, body in server.requests if "max_tokens" in body]
    results = load([tmp_path])
    assert set(results.of(metric="latency")["round"]) == {1, 2, 3}
    assert results.of(metric="aborted")["value"].sum() > 0
    assert any(len(body.get("messages", ())) > 1 for body in bodies), "chats grow"
    assert any("prompt" in body for body in bodies)
    assert "0 FAILED" in capsys.readouterr().out


def test_a_failure_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(fail=lambda path: 500 if path == "/v1/completions" else None, token_delay=0.002)
    with FakeServer(script) as server:
        assert main(["soak", *QUICK, "--aborts", "0", "--url", server.url, "--out", str(tmp_path)]) == 1
    assert "requests failed; the first: POST /v1/completions answered 500" in capsys.readouterr().err
    assert load([tmp_path]).of(metric="failed")["value"].sum() > 0


def made(values: list[float], metric: str) -> Results:
    rows = [["r", "s", "soak", "8 concurrent", at, metric, value, ""] for at, value in enumerate(values, 1)]
    return Results(pd.DataFrame(rows, columns=list(COLUMNS)), {})


def test_a_leak_is_found_and_noise_is_not() -> None:
    leak = made([100.0 + 5 * at for at in range(40)], "resident_memory")
    ratio = drift(leak.frame, "resident_memory")
    assert ratio is not None
    assert ratio.value < 0.7
    assert ["resident memory of the server" in told for told in drifts(leak)] == [True]
    steady = made([100.0 + 5 * (at % 2) for at in range(40)], "output_rate")
    assert list(drifts(steady)) == []
    assert drift(made([1.0] * 32, "itl").frame, "itl") is None, "too few windows"


def test_answers_that_depend_on_load_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qwen_serve.bench.load.soak.REFERENCES", 5)
    quick = [*QUICK, "--deterministic", "--aborts", "0", "--out", str(tmp_path)]
    with FakeServer(Script(token_delay=0.002)) as server:
        assert main(["soak", *quick, "--url", server.url]) == 0
    results = load([tmp_path])
    assert results.of(metric="compared_answers")["value"].sum() > 5
    assert ": 0 are OTHERS" in capsys.readouterr().out
    counter = itertools.count()

    def other(_: str, event: dict[str, Any]) -> dict[str, Any]:
        for choice in event.get("choices", ()):
            if "text" in choice:
                choice["text"] = f"{choice['text']}{next(counter)}"
        return event

    with FakeServer(Script(token_delay=0.002, on_event=other)) as server:
        assert main(["soak", *quick, "--url", server.url]) == 1
    assert "are not those that the same requests got alone" in capsys.readouterr().err
