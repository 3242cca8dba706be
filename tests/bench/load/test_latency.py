"""The latency command sends the protocols' requests and records all results, including failures."""

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from qwen_serve.bench.cli import main
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.load.latency import read_baseline
from qwen_serve.bench.load.protocol import FILLER
from qwen_serve.bench.store import Results, load
from tests.bench.fake_server import Body, FakeServer, Script

SHORT = ["--categories", "short", "--warmup", "1"]
FEW = ["--runs", "3", "--stream-runs", "2"]


def measure(server: FakeServer, store: Path, *options: str, status: int = 0) -> Results:
    """Run the command and load what it recorded."""
    assert (
        main(
            [
                "latency",
                "--url",
                server.url,
                "--out",
                str(store),
                *SHORT,
                *(options if "--runs" in options or "--stream-runs" in options else (*FEW, *options)),
            ]
        )
        == status
    )
    return load([store])


def values(results: Results, metric: str, workload: str) -> list[float]:
    return results.of(metric=metric, workload=workload)["value"].tolist()


def test_both_protocols_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(Script(first_token_delay=0.02)) as server:
        results = measure(server, tmp_path, "--name", "fake")
    assert set(results.frame["subject"]) == {"fake"}
    for protocol in ("official", "distinct"):
        latencies = values(results, "latency", protocol)
        assert len(latencies) == 3, "without warm-ups, without streamed ones"
        assert min(latencies) > 20
        assert len(values(results, "ttft", protocol)) == len(values(results, "itl", protocol)) == 2
        assert min(values(results, "ttft", protocol)) > 20
        assert values(results, "verified_tokens", protocol) == [128.0] * 3
    assert results.of(metric="latency", workload="official")["round"].tolist() == [1, 2, 3]
    assert sum(values(results, "cached_tokens", "distinct")) < 12, "of 192: first letters, by chance"
    shown = capsys.readouterr().out
    assert "latency ms" in shown
    assert "TTFT p50" in shown
    assert "Steps of our engine" in shown
    steps = results.of(workload="steps", cell="official, short, decode, 1 rows")
    assert steps.groupby("metric")["value"].sum().to_dict() == {"steps": 10.0, "step_tokens": 30.0}
    (manifest,) = results.manifests.values()
    assert manifest.subjects["fake"]["model"] == "fake"
    assert manifest.settings["baseline"]["short"] == 2582.0


def test_the_official_body_is_as_published(tmp_path: Path) -> None:
    with FakeServer() as server:
        measure(server, tmp_path, "--protocol", "official")
        sent = [body for path, body in server.requests if path == "/invocations"]
    assert sent == [{"prompt": FILLER * 6, "max_tokens": 128, "temperature": 0.0}] * 4


def test_distinct_prompts_are_distinct_and_exact(tmp_path: Path) -> None:
    with FakeServer() as server:
        results = measure(server, tmp_path, "--protocol", "distinct")
        prompts = [body["prompt"] for _, body in server.requests]
    assert {len(prompt) for prompt in prompts} == {64}
    assert len(set(prompts)) == len(prompts) == 1 + 3 + 1 + 2
    assert set(values(results, "prompt_tokens", "distinct")) == {64.0}


def test_claims_that_do_not_recount_are_flagged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def inflate(_: str, answer: Body) -> Body:
        return {**answer, "usage": {"prompt_tokens": 64, "completion_tokens": 200, "total_tokens": 264}}

    with FakeServer(Script(on_answer=inflate)) as server:
        results = measure(server, tmp_path, "--protocol", "official")
    assert values(results, "verified_tokens", "official") == [128.0] * 3
    assert "3 answers re-count to other lengths than claimed (600 claimed, 384 verified)" in (
        capsys.readouterr().out
    )


def failing_after(good: int) -> Callable[[str], int | None]:
    """A hook that answers every generation after the first ``good`` ones with 500."""
    seen = count()
    return lambda path: 500 if path in ("/invocations", "/v1/completions") and next(seen) >= good else None


def test_a_timeout_of_one_request_does_not_lose_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, seen = Script(), count()

    def stall_the_third(path: str, body: Body) -> Body:
        script.first_token_delay = 30.0 if path == "/invocations" and next(seen) == 2 else 0.0
        return body

    script.on_request = stall_the_third
    with FakeServer(script) as server:
        results = measure(server, tmp_path, "--protocol", "official", "--timeout", "3", status=1)
    assert len(values(results, "latency", "official")) == 2
    assert values(results, "failed", "official") == [1.0]
    assert len(values(results, "ttft", "official")) == 2, "what came after it was measured"
    shown = capsys.readouterr()
    assert "1 requests FAILED" in shown.out
    assert "no answer within 3 s" in shown.err


def test_later_failures_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(Script(fail=failing_after(3))) as server:
        results = measure(
            server, tmp_path, "--protocol", "official", "--runs", "3", "--stream-runs", "0", status=1
        )
    assert (len(values(results, "latency", "official")), len(values(results, "failed", "official"))) == (2, 1)
    assert "error: 1 requests failed; the first: POST /invocations answered 500" in capsys.readouterr().err


def test_a_server_that_has_died_is_given_up_with_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeServer(Script(fail=failing_after(5))) as server:
        results = measure(server, tmp_path, "--protocol", "official", "--runs", "50", status=1)
    assert (len(values(results, "latency", "official")), len(values(results, "failed", "official"))) == (4, 3)
    (manifest,) = results.manifests.values()
    assert manifest.status == "stopped"
    shown = capsys.readouterr()
    assert "3 requests in a row failed" in shown.err
    assert "latency ms" in shown.out, "what was measured is shown"


def test_a_server_of_500s_is_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(Script(fail=failing_after(0))) as server:
        assert main(["latency", "--url", server.url, "--out", str(tmp_path), *SHORT]) == 1
    shown = capsys.readouterr()
    assert "error: official, short, warm-up: POST /invocations answered 500: scripted failure" in shown.err
    assert "latency ms" not in shown.out
    assert list(tmp_path.iterdir()) == []


def test_a_second_question_follows_the_first_one_about_its_picture(tmp_path: Path) -> None:
    sizes = ["--protocol", "images", "--image-resolution", "48x32,64x64"]
    with FakeServer() as server:
        results = measure(server, tmp_path, "--stream-runs", "2", *sizes)
        asked = [body["messages"][0]["content"] for path, body in server.requests if "messages" in body]
    assert [len(parts) for parts in asked] == [2] * len(asked)
    shown, questions = ([parts[place] for parts in asked] for place in (0, 1))
    # for each size a warm-up and two first questions, then a warm-up and each picture's first and second
    for at in (0, 8):
        _, first, other, _, *again = shown[at : at + 8]
        assert first != other
        assert again == [first, first, other, other]
        assert questions[at + 4] == questions[at + 1] != questions[at + 5]
    assert len(asked) == 16
    for cell in ("48x32, first question", "48x32, second question", "64x64, second question"):
        assert len(results.of(metric="ttft", cell=cell)) == 2, "what is asked before is not timed"


def test_nothing_listens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["latency", "--url", "http://127.0.0.1:9", "--out", str(tmp_path)]) == 1
    assert "error: http://127.0.0.1:9: cannot connect" in capsys.readouterr().err


def test_given_baselines() -> None:
    assert read_baseline("none") == {}
    assert read_baseline("short=100,long=300") == {"short": 100.0, "long": 300.0}
    for wrong, message in (("tiny=5", "tiny: want some of short"), ("short=x", "want a number above 0")):
        with pytest.raises(BenchError, match=message):
            read_baseline(wrong)
