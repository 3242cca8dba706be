"""Answers under load are compared with those alone. Differences are reported in the verdict."""

import json
import os
import signal
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from qwen_serve.bench.cli import main
from qwen_serve.bench.load.kinds import KINDS, TURNS
from tests.bench.fake_server import Body, FakeServer, Script
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
QUICK = ["--tokenizer", str(ROOT / "models" / "nano"), "--requests", str(len(KINDS)), "--levels", "1,4"]
QUICK += ["--input-tokens", "24", "--output-tokens", "8", "--aborts", "0.3"]

ANSWERS = sum(TURNS if name.endswith("chat") else 1 for name in KINDS)
"""Answers to a conversation of each kind."""


def scored(answer: Body, logprob: float = -0.25) -> Body:
    """An answer with a log-probability, and with a tool call whose id is new each time."""
    for choice in answer["choices"]:
        choice["logprobs"] = {"content": [{"token": "a", "logprob": logprob}]}
        if "message" in choice:
            choice["message"]["tool_calls"] = [{"id": answer["id"], "function": {"name": "travel"}}]
    return answer


def verdict(tmp_path: Path, servers: list[FakeServer], status: int) -> dict[str, Any]:
    named = [word for server in servers for word in ("--peer", f"{server.url[-5:]}={server.url}")]
    assert main(["soak", "answers", *QUICK, *named, "--out", str(tmp_path)]) == status
    [path] = tmp_path.rglob("verdict.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_answers_that_are_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(Script(on_answer=lambda _, answer: scored(answer))) as server:
        found = verdict(tmp_path, [server], 0)
        asked = [body for _, body in server.requests if not body.get("stream") and "max_tokens" in body]
    assert (found["same"], found["compared"], found["differ"]) == (True, 2 * ANSWERS, 0)
    assert len(asked) == 3 * ANSWERS
    assert len({body["seed"] for body in asked}) == len(KINDS)
    unscored = [body for body in asked if "logprobs" not in body]
    for field in ("response_format", "grammar", "tools", "logit_bias", "repetition_penalty"):
        assert any(field in body for body in unscored), field
        assert field == "grammar" or any(field in body and "logprobs" in body for body in asked), field
    assert sum("prompt_logprobs" in body for body in asked) == 3
    assert found["left"] > 0
    told = capsys.readouterr().out
    table = [line.split()[-6:] for line in told.splitlines() if f" {ANSWERS} " in line]
    assert [line[0] for line in table] == ["1", "4"], told
    assert [line[2:5] for line in table] == [[str(ANSWERS), "0", "0"]] * 2
    assert told.splitlines()[-1].startswith(f"SAME: {2 * ANSWERS} answers of 1 servers at 1, 4 at once")


def test_a_log_probability_that_differs_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = count()
    least = -0.25 - 2**-50

    def now_and_then(_: str, answer: Body) -> Body:
        return scored(answer, least if next(numbers) == ANSWERS + 5 else -0.25)

    with (
        FakeServer(Script(on_answer=lambda _, answer: scored(answer))) as first,
        FakeServer(Script(on_answer=now_and_then)) as other,
    ):
        found = verdict(tmp_path, [first, other], 1)
    [difference] = found["differences"]
    assert (difference["server"], difference["level"]) == (other.url[-5:], "4 concurrent")
    assert str(least) in difference["here"]
    assert 0 < difference["character"] < difference["characters"]
    assert f"NOT THE SAME: {4 * ANSWERS} answers of 2 servers" in capsys.readouterr().out


def test_a_stopped_run_says_what_it_has_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = count()

    def until_the_fifth_again(_: str, answer: Body) -> Body:
        if next(numbers) == ANSWERS + 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return scored(answer)

    with FakeServer(Script(on_answer=until_the_fifth_again)) as server, pytest.raises(SystemExit):
        verdict(tmp_path, [server], 0)
    [path] = tmp_path.rglob("verdict.json")
    found = json.loads(path.read_text())
    assert (found["same"], found["differ"], found["failed"]) == (False, 0, 0)
    assert 0 < found["compared"] < ANSWERS
    assert "SAME, BUT STOPPED EARLY" in capsys.readouterr().out


@pytest.mark.parametrize("ahead", [False, True])
def test_the_next_server_starts_while_one_answers(tmp_path: Path, ahead: bool) -> None:
    seen = set()

    def look(_: str, answer: Body) -> Body:
        if ahead:
            wait_until(lambda: other.connections > 0)
        seen.add(other.connections > 0)
        return scored(answer)

    with (
        FakeServer(Script(on_answer=lambda _, answer: scored(answer))) as other,
        FakeServer(Script(on_answer=look)) as first,
    ):
        words = ["--start-ahead"] if ahead else []
        named = [word for server in (first, other) for word in ("--peer", f"{server.url[-5:]}={server.url}")]
        assert main(["soak", "answers", *QUICK, *words, *named, "--out", str(tmp_path)]) == 0
    assert (True in seen) == ahead


def test_answers_without_log_probabilities_prove_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeServer() as server:
        words = ["--peer", server.url, "--out", str(tmp_path)]
        assert main(["soak", "answers", *QUICK, *words]) == 1
        assert main(["soak", "answers", *QUICK, *words, "--flags=--threads 1"]) == 1
    told = capsys.readouterr().err
    assert "no log-probabilities in the answer" in told
    assert "--flags are for the usual servers" in told
