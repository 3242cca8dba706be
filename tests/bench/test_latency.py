"""The latency benchmark sends what the protocols say and reports what came back, failures included."""

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median

import pytest

from bench import latency
from bench.errors import BenchError
from bench.latency_report import draw, latency_table, stream_table
from bench.latency_result import FILLER, LatencyResult, read_baseline
from bench.options import run
from tests.bench.fake_server import FakeServer, Script

SHORT = ["--categories", "short", "--runs", "3", "--warmup", "1", "--stream-runs", "2"]


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a second each; one test draws."""
    monkeypatch.setattr(latency, "draw", lambda *_: None)


def measure(server: FakeServer, tmp_path: Path, *options: str) -> LatencyResult:
    """Run the command, which must succeed, and load what it wrote."""
    out = tmp_path / "latency.json"
    status = run(
        latency.parser(), latency.latency, ["--url", server.url, "--out", str(out), *SHORT, *options]
    )
    assert status == 0
    return LatencyResult.load(out)


@pytest.fixture
def server() -> "FakeServer":
    return FakeServer(Script(first_token_delay=0.02))


def test_both_protocols_side_by_side(server: FakeServer, tmp_path: Path) -> None:
    with server:
        result = measure(server, tmp_path)
    assert [(line.protocol, line.runs, line.errors) for line in result.summaries] == [
        ("official", 3, 0),
        ("distinct", 3, 0),
    ]
    assert len(result.runs) == 2 * (1 + 3 + 1 + 2)
    for line in result.summaries:
        timed = [r for r in result.runs if r.protocol == line.protocol and not r.streamed and not r.warmup]
        assert line.latency is not None
        assert line.latency.p50 == pytest.approx(median(r.seconds for r in timed))
        assert line.speedup == pytest.approx(2.582 / line.latency.p50)
        assert line.completion_tokens == 128
        assert line.first_token is not None
        assert line.first_token.p50 > 0.02
    official, distinct = result.summaries
    assert official.cached_share is not None
    assert official.cached_share > 0.9
    assert distinct.cached_share == 0
    assert result.speedup == {"official": None, "distinct": None}, "the score needs all three categories"
    assert "official ms" in str(latency_table(result))
    assert "TTFT p50" in str(stream_table(result))
    draw(result, tmp_path / "latency.svg")
    assert "distinct" in (tmp_path / "latency.svg").read_text()


def test_the_official_body_is_as_published(server: FakeServer, tmp_path: Path) -> None:
    with server:
        measure(server, tmp_path, "--protocol", "official")
        sent = [body for path, body in server.requests if path == "/invocations"]
    assert sent == [{"prompt": FILLER * 6, "max_tokens": 128, "temperature": 0.0}] * 4


def test_distinct_prompts_are_distinct_and_exact(server: FakeServer, tmp_path: Path) -> None:
    with server:
        result = measure(server, tmp_path, "--protocol", "distinct")
        prompts = [body["prompt"] for _, body in server.requests]
        assert {len(server.vocabulary.encode(prompt)) for prompt in prompts} == {64}
    assert len(set(prompts)) == len(prompts) == 7
    assert {run.prompt_tokens for run in result.runs} == {64}
    assert {run.recounted_tokens for run in result.runs} == {128}
    assert " - " in str(latency_table(result)), "the protocol that was not run stands as dashes"


def test_claims_that_do_not_recount_are_flagged(tmp_path: Path) -> None:
    def inflate(_: str, answer: dict[str, object]) -> dict[str, object]:
        usage = {"prompt_tokens": 64, "completion_tokens": 200, "total_tokens": 264}
        return {**answer, "usage": usage}

    with FakeServer(Script(on_answer=inflate)) as server:
        result = measure(server, tmp_path)
    assert [line.miscounted for line in result.summaries] == [3, 3]
    assert "re-count to other lengths" in str(latency_table(result))


def test_a_measured_baseline(server: FakeServer, tmp_path: Path) -> None:
    with server:
        measure(server, tmp_path)
        first = (tmp_path / "latency.json").rename(tmp_path / "first.json")
        result = measure(server, tmp_path, "--baseline", str(first))
    for line, before in zip(result.summaries, LatencyResult.load(first).summaries, strict=True):
        assert before.latency is not None
        assert line.latency is not None
        assert line.speedup == pytest.approx(before.latency.p50 / line.latency.p50)


def test_given_baselines() -> None:
    assert read_baseline("none") is None
    given = read_baseline("short=100,long=300")
    assert given is not None
    assert given.seconds["distinct"] == {"short": 0.1, "long": 0.3}
    for wrong, message in (("tiny=5", "unknown category 'tiny'"), ("short=x", "want category=milliseconds")):
        with pytest.raises(BenchError, match=message):
            read_baseline(wrong)
    with pytest.raises(BenchError, match="cannot be read"):
        read_baseline("/no/such/file.json")


def test_a_file_that_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"kind": "quality"}))
    with pytest.raises(BenchError, match="not a LatencyResult"):
        read_baseline(str(tmp_path / "other.json"))


def failing_after(good: int) -> Callable[[str], int | None]:
    """500 for every generation after the first ``good`` ones."""
    seen = count()
    return lambda path: 500 if path in ("/invocations", "/v1/completions") and next(seen) >= good else None


def test_a_server_of_500s_is_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(Script(fail=failing_after(0))) as server:
        out = tmp_path / "latency.json"
        arguments = ["--url", server.url, "--out", str(out), *SHORT]
        assert run(latency.parser(), latency.latency, arguments) == 1
    shown = capsys.readouterr()
    assert "error: short, official, warm-up: POST /invocations answered 500: scripted failure" in shown.err
    assert "official ms" not in shown.out
    assert not out.exists()


def test_later_failures_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(Script(fail=failing_after(3))) as server:
        out = tmp_path / "latency.json"
        arguments = ["--url", server.url, "--out", str(out), *SHORT, "--protocol", "official"]
        arguments += ["--stream-runs", "0"]
        assert run(latency.parser(), latency.latency, arguments) == 1
    (line,) = LatencyResult.load(out).summaries
    assert (line.runs, line.errors) == (2, 1)
    shown = capsys.readouterr()
    assert "1 requests FAILED" in shown.out
    assert "error: 1 requests failed" in shown.err


def test_nothing_listens(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(latency.parser(), latency.latency, ["--url", "http://127.0.0.1:9"]) == 1
    assert "error: http://127.0.0.1:9: cannot connect" in capsys.readouterr().err
