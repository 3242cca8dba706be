"""The throughput benchmark keeps its concurrency, verifies tokens, and never hides a failure."""

from itertools import count
from pathlib import Path
from typing import Any

import pytest

from bench import throughput
from bench.options import run
from bench.throughput_report import draw, level_table, turn_table
from bench.throughput_result import WEIGHTS, Level, ThroughputResult, score
from tests.bench.fake_server import Body, FakeReply, FakeServer, Script, reply_to

SMALL = ["--input-tokens", "24", "--output-tokens", "12", "--requests", "8"]


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a second each; one test draws."""
    monkeypatch.setattr(throughput, "draw", lambda *_: None)


def measure(server: FakeServer, tmp_path: Path, *options: str, status: int = 0) -> ThroughputResult:
    """Run the command and load what it wrote."""
    out = tmp_path / "throughput.json"
    arguments = ["--url", server.url, "--out", str(out), *SMALL, *options]
    assert run(throughput.parser(), throughput.throughput, arguments) == status
    return ThroughputResult.load(out)


def test_levels(tmp_path: Path) -> None:
    with FakeServer(Script(token_delay=0.02)) as server:
        result = measure(server, tmp_path, "--levels", "1,4", "--spot-checks", "1")
        prompts = [body["prompt"] for _, body in server.requests if "prompt" in body]
        assert {len(server.vocabulary.encode(prompt)) for prompt in prompts} == {24}
    assert len(set(prompts)) == len(prompts) == 2 * (2 + 8)
    assert server.peak == 5, "4 workers and the spot check"
    one, four = result.levels
    assert (one.requests, one.errors, one.verified_output_tokens) == (8, 0, 96)
    assert one.output_rate == pytest.approx(96 / one.seconds)
    assert one.total_rate == pytest.approx((96 + 8 * 24) / one.seconds)
    assert four.output_rate > 2 * one.output_rate
    assert four.seconds < one.seconds
    assert one.first_token is not None
    assert one.per_token is not None
    assert one.per_token.p50 >= 0.02
    assert [check.passed for check in result.spot_checks] == [True, True]
    assert result.score is not None
    assert not result.score.protocol
    assert result.score.value == pytest.approx(1 * one.output_rate + 2 * four.output_rate)
    assert "levels 2, 8, 16, 32, 64 were not run" in str(level_table(result))
    assert turn_table(result) is None


def test_claimed_tokens_are_verified(tmp_path: Path) -> None:
    def inflate(_: str, event: Body) -> Body:
        return (
            event
            if not event.get("usage")
            else {**event, "usage": {**event["usage"], "completion_tokens": 999}}
        )

    with FakeServer(Script(on_event=inflate)) as server:
        result = measure(server, tmp_path, "--levels", "2")
    (level,) = result.levels
    assert (level.claimed_output_tokens, level.verified_output_tokens) == (8 * 999, 8 * 12)
    assert level.miscounted == 8
    assert "(7,992 claimed, 96 verified)" in str(level_table(result))


def test_without_a_tokenizer_the_counts_are_claims(tmp_path: Path) -> None:
    with FakeServer(Script(tokenizer=None)) as server:
        result = measure(server, tmp_path, "--levels", "2")
    assert result.token_counts == "the server's own usage"
    assert result.score is not None
    assert "token counts are the server's own claims" in result.score.deviations
    assert {request.prompt_tokens for request in result.requests} == {24}


def test_shared_prefix(tmp_path: Path) -> None:
    with FakeServer() as server:
        options = ("--workload", "shared-prefix", "--prefix-tokens", "50", "--subjects", "2", "--levels", "1")
        result = measure(server, tmp_path, *options)
        sent = [body["messages"][0]["content"] for _, body in server.requests if body["max_tokens"] == 12][2:]
        halves = [text.split("\n\n") for text in sent]
        assert {len(server.vocabulary.encode(prefix)) for prefix, _ in halves} == {50}
    assert [prefix for prefix, _ in halves] == [halves[0][0]] * 4 + [halves[4][0]] * 4
    assert len({question for _, question in halves}) == 8
    (level,) = result.levels
    assert level.cached_share is not None
    assert 0.4 < level.cached_share < 0.7, "six of eight prompts share 50 of 74 tokens with one before"
    assert result.score is None


def test_conversations_grow(tmp_path: Path) -> None:
    with FakeServer() as server:
        result = measure(
            server, tmp_path, "--workload", "chat", "--turns", "3", "--levels", "2", "--warmup", "0"
        )
        chats = [body["messages"] for _, body in server.requests if body["max_tokens"] == 12]
    roles = [[message["role"] for message in messages] for messages in chats]
    assert {len(turn) for turn in roles} == {1, 3, 5}
    assert max(roles, key=len) == ["user", "assistant", "user", "assistant", "user"]
    assert result.levels[0].requests == 9, "three conversations"
    first, second, third = result.turns
    assert first.prompt_tokens < second.prompt_tokens < third.prompt_tokens
    assert first.cached_share is not None
    assert third.cached_share is not None
    assert third.cached_share > first.cached_share
    assert "2, turn 3" in str(turn_table(result))
    draw(result, tmp_path / "throughput.png")
    assert (tmp_path / "throughput.png").read_bytes().startswith(b"\x89PNG")


def test_a_wrong_sum_fails_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(body: Body) -> FakeReply:
        reply = reply_to(body)
        return FakeReply(reply.content.replace("answer is ", "answer is 9"))

    with FakeServer(Script(reply=wrong)) as server:
        result = measure(server, tmp_path, "--levels", "2", status=1)
    assert [check.passed for check in result.spot_checks] == [False, False]
    shown = capsys.readouterr()
    assert "spot check FAILED" in shown.out
    assert "error: 2 of 2 spot checks failed" in shown.err


def test_some_failures_are_counted_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = count()

    def sometimes(path: str) -> int | None:
        return 500 if path == "/v1/completions" and next(seen) in (4, 7) else None

    with FakeServer(Script(fail=sometimes)) as server:
        result = measure(server, tmp_path, "--levels", "2", status=1)
    (level,) = result.levels
    assert (level.requests, level.errors, level.verified_output_tokens) == (8, 2, 6 * 12)
    assert "error: 2 requests failed; the first: POST /v1/completions answered 500" in capsys.readouterr().err


def test_a_level_that_fails_ends_the_run_but_keeps_the_others(tmp_path: Path) -> None:
    seen = count()
    with FakeServer(
        Script(fail=lambda path: 500 if path == "/v1/completions" and next(seen) >= 12 else None)
    ) as server:
        result = measure(server, tmp_path, "--levels", "1,2", status=1)
    assert [level.concurrency for level in result.levels] == [1]
    assert "STOPPED: level 2: all 8 requests failed" in str(level_table(result))


def test_a_server_of_500s_is_no_table_of_zeros(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(Script(fail=lambda path: 500 if "completions" in path else None)) as server:
        out = tmp_path / "throughput.json"
        arguments = ["--url", server.url, "--out", str(out), *SMALL]
        assert run(throughput.parser(), throughput.throughput, arguments) == 1
    shown = capsys.readouterr()
    assert "error: level 1, warm-up: POST /v1/completions answered 500" in shown.err
    assert "tok/s" not in shown.out
    assert not out.exists()


def test_nothing_listens(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(throughput.parser(), throughput.throughput, ["--url", "http://127.0.0.1:9"]) == 1
    assert "cannot connect" in capsys.readouterr().err


def level_of(concurrency: int, **changes: Any) -> Level:
    spread = {"p10": 1.0, "p50": 1.0, "p90": 1.0, "p99": 1.0}
    fields: dict[str, Any] = {
        "concurrency": concurrency,
        "requests": 64,
        "errors": 0,
        "seconds": 1.0,
        "output_rate": 100.0 * concurrency,
        "total_rate": 200.0 * concurrency,
        "claimed_output_tokens": 1,
        "verified_output_tokens": 1,
        "latency": spread,
        "first_token": None,
        "per_token": None,
        "longest_gap": None,
        "cached_share": None,
        "miscounted": 0,
        "stopped_early": 0,
        "spot_checks": 2,
        "spot_checks_passed": 2,
    }
    return Level(**{**fields, **changes})


def test_the_score_is_the_protocols_only_when_every_rule_held() -> None:
    levels = [level_of(concurrency) for concurrency in WEIGHTS]
    full = score(levels, input_tokens=1024, output_tokens=1024, recounted=True)
    assert full is not None
    assert full.protocol
    assert full.value == 100 * (1 * 1 + 1 * 2 + 2 * 4 + 2 * 8 + 4 * 16 + 4 * 32 + 8 * 64)
    assert score([level_of(3)], input_tokens=1024, output_tokens=1024, recounted=True) is None
    for broken in (
        {"errors": 1},
        {"claimed_output_tokens": 1000, "verified_output_tokens": 970},
        {"spot_checks_passed": 1},
        {"requests": 8},
    ):
        spoiled = score(
            [level_of(1, **broken), *levels[1:]], input_tokens=1024, output_tokens=1024, recounted=True
        )
        assert spoiled is not None
        assert not spoiled.protocol
        assert len(spoiled.deviations) == 1
