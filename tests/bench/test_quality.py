import json
from dataclasses import replace
from pathlib import Path

import pytest

from qwen_serve.bench.cli import main
from qwen_serve.bench.gates.estimate import Paired
from qwen_serve.bench.gates.quality import SAMPLES
from qwen_serve.bench.gates.samples import Sample, read_samples
from qwen_serve.bench.gates.score import SUBTASKS, GateScore, gate_scores
from qwen_serve.bench.store import Results, load
from tests.bench.fake_server import Body, FakeReply, FakeServer, Script, thinks
from tests.bench.gates.data import all_right, answering, nano_folder

PATH = "/v1/chat/completions"


@pytest.fixture
def nano(tmp_path: Path) -> Path:
    return nano_folder(tmp_path / "nano", all_right())


def measure(server: FakeServer, nano: Path, out: Path, *options: str) -> Results:
    argv = ["--url", server.url, "--nano", str(nano), "--out", str(out), "--retries", "0", *options]
    assert main(["quality", *argv]) == 0
    return load([out])


def scored(results: Results) -> list[GateScore]:
    return gate_scores(results.frame)


def samples_of(results: Results, out: Path) -> list[Sample]:
    (run,) = results.manifests
    return read_samples(out / run / SAMPLES)


def test_scores_are_what_the_answers_are_worth(
    nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {("knowledge", 0), ("knowledge", 9), ("instructions", 2), ("reasoning", 3), ("reasoning", 4)}
    with FakeServer(Script(reply=answering(lambda *item: item not in wrong))) as server:
        results = measure(server, nano, tmp_path)
    gates = scored(results)
    knowledge, instructions, reasoning = gates
    # the mean over subtasks: 5 of 6 people, 3 of 4 places
    assert knowledge.score == pytest.approx((5 / 6 + 3 / 4) / 2)
    subtasks = results.of(workload=SUBTASKS)
    assert dict(zip(subtasks["cell"], subtasks["value"], strict=True)) == pytest.approx(
        {"nano_knowledge_people": 100 * 5 / 6, "nano_knowledge_places": 75}
    )
    # 10 instructions in 8 requests; request 2 has two of them
    assert instructions.score == pytest.approx(8 / 10)
    (manifest,) = results.manifests.values()
    about = manifest.subjects[server.url]["gates"]["nano_instructions"]
    assert about["other_metrics"]["nano_instructions"]["prompt_level_strict_acc,none"] == pytest.approx(7 / 8)
    assert (about["fewshot"], about["thinking"], about["max_tokens"]) == (0, False, 512)
    assert reasoning.score == pytest.approx(6 / 8)
    assert [gate.items for gate in gates] == [10, 8, 8]
    for gate in gates:
        assert gate.low is not None and gate.high is not None
        assert 0 < gate.low < gate.score < gate.high < 1
        assert gate.reference_score == gate.baseline == 1.0
    assert [gate.paired for gate in gates] == [Paired(2, 0), Paired(1, 0), Paired(2, 0)]
    # shares of the reference's score: 90%, 95%, 90%; every item was asked, so the score decides
    assert [gate.threshold for gate in gates] == pytest.approx([0.90, 0.95, 0.90])
    assert [gate.verdict for gate in gates] == ["fail", "fail", "fail"]
    shown = capsys.readouterr().out
    assert "not shown to be worse than it (2 lost, 0 gained, p = 0.5)" in shown
    assert "nano_reasoning" in shown and "75.0" in shown and "fail" in shown


def test_modes_are_the_contracts(nano: Path, tmp_path: Path) -> None:
    with FakeServer(Script(reply=answering(lambda *_: True))) as server:
        gates = scored(measure(server, nano, tmp_path))
        asked = [body for path, body in server.requests if path == PATH][1:]  # the probe came first
    assert [gate.verdict for gate in gates] == ["pass", "pass", "pass"]
    knowledge = [body for body in asked if "thing number" in body["messages"][-1]["content"]]
    instructions = [body for body in asked if "Request" in body["messages"][-1]["content"]]
    reasoning = [body for body in asked if "Problem" in body["messages"][-1]["content"]]
    assert (len(knowledge), len(instructions), len(reasoning)) == (10, 8, 8)
    assert all(body["temperature"] == 0 and body["model"] == "fake" for body in asked)
    for body in knowledge:
        system, *shots, _ = body["messages"]
        assert system["role"] == "system" and "multiple choice questions" in system["content"]
        assert [shot["role"] for shot in shots] == ["user"] * 5
        assert all("The answer is (" in shot["content"] for shot in shots)
        assert body["stop"] == ["Question:"]
    for body in knowledge + instructions:
        assert body["max_tokens"] == 512
        assert not thinks(body) and not body.get("stream")
        assert body["chat_template_kwargs"] == {"enable_thinking": False}
    for body in reasoning:
        assert body["max_tokens"] == 2_048
        assert thinks(body) and body["stream"] is True


def test_single_turn_puts_the_examples_into_one_message(nano: Path, tmp_path: Path) -> None:
    with FakeServer(Script(reply=answering(lambda *_: True))) as server:
        measure(server, nano, tmp_path, "--tasks", "nano_knowledge", "--single-turn")
        _, body = server.requests[-1]
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert body["messages"][1]["content"].count("The answer is (") == 5


def test_samples_keep_the_whole_reply(nano: Path, tmp_path: Path) -> None:
    with FakeServer(Script(reply=answering(lambda _, number: number != 5))) as server:
        results = measure(server, nano, tmp_path, "--tasks", "nano_reasoning")
    samples = {sample.id: sample for sample in samples_of(results, tmp_path)}
    assert sorted(samples) == [str(n) for n in range(8)]
    assert samples["5"].outcomes == [0.0] and samples["5"].extracted == "(C)" and samples["5"].target == "(B)"
    right = samples["4"]
    assert (right.answer, right.reasoning) == ("The answer is (A).", "Let me see: (A) or (B)?")
    assert right.outcomes == right.reference == [1.0]
    assert right.prompt.startswith(
        "What is the correct answer to this question:Problem 4?\nChoices:\n(A) result 4"
    )
    assert right.finish_reason == "stop" and right.completion_tokens is not None and right.seconds > 0


def test_thinking_that_does_not_end_is_wrong_and_counted(
    nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def reply(body: Body) -> FakeReply:
        answer = answering(lambda *_: True)(body)
        # round and round, with the right letter in it
        return FakeReply(answer.content, "no wait " * 3_000) if "Problem 2" in str(body) else answer

    with FakeServer(Script(reply=reply)) as server:
        (gate,) = scored(measure(server, nano, tmp_path, "--tasks", "nano_reasoning"))
    assert (gate.score, gate.cut, gate.truncated_thinking, gate.empty) == (7 / 8, 1, 1, 1)
    assert "1 of 8 replies were still thinking after 2,048 tokens" in capsys.readouterr().out


def test_a_sample_leaves_the_verdict_open(nano: Path, tmp_path: Path) -> None:
    with FakeServer(Script(reply=answering(lambda _, number: number % 8 != 1))) as server:
        first = measure(server, nano, tmp_path / "half", "--limit", "0.5")
        some = measure(server, nano, tmp_path / "few", "--limit", "3", "--tasks", "nano_instructions")
        again = scored(measure(server, nano, tmp_path / "again", "--limit", "0.5"))
    half, (few,) = scored(first), scored(some)
    assert [gate.items for gate in half] == [5, 4, 4]
    assert [gate.items_in_all for gate in half] == [10, 8, 8]
    assert few.items == 3
    assert "undecided" in {gate.verdict for gate in half}
    assert [replace(gate, seconds=0) for gate in half] == [replace(gate, seconds=0) for gate in again]
    drawn = {one.id for one in samples_of(some, tmp_path / "few")}
    of_half = samples_of(first, tmp_path / "half")
    assert drawn < {one.id for one in of_half if one.gate == "nano_instructions"}


def test_the_reference_is_scored_on_the_items_that_were_drawn(tmp_path: Path) -> None:
    reference = all_right()
    reference["reasoning"] = {str(n): n < 4 for n in range(8)}
    nano = nano_folder(tmp_path / "nano", reference)
    out = tmp_path / "out"
    with FakeServer(Script(reply=answering(lambda _, number: number < 4))) as server:
        results = measure(server, nano, out, "--tasks", "nano_reasoning", "--limit", "5")
    (gate,) = scored(results)
    assert gate.threshold == pytest.approx(0.9 * 0.5)  # of the reference's score on all
    right = sum(int(one.id) < 4 for one in samples_of(results, out))
    assert gate.reference_score == pytest.approx(gate.score) == pytest.approx(right / 5)


def failing(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The error of a run, which prints no table."""
    assert main(["quality", *argv, "--retries", "0"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_an_unreachable_server_is_an_error(
    nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    message = failing(capsys, "--url", "http://127.0.0.1:9", "--nano", str(nano), "--out", str(out))
    assert not out.exists()
    assert "error: http://127.0.0.1:9: cannot connect" in message


def test_a_server_that_answers_500_is_an_error(
    nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeServer(Script(fail=lambda path: 500 if path == PATH else None)) as server:
        message = failing(capsys, "--url", server.url, "--nano", str(nano), "--out", str(tmp_path / "out"))
    assert "error: POST /v1/chat/completions answered 500: scripted failure" in message


def test_a_server_that_fails_half_way_is_an_error(
    nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    script = Script(reply=answering(lambda *_: True))
    with FakeServer(script) as server:
        script.fail = lambda path: 503 if path == PATH and len(server.requests) > 14 else None
        argv = ["--url", server.url, "--nano", str(nano), "--out", str(out), "--retries", "0"]
        assert main(["quality", *argv]) == 1
    shown = capsys.readouterr()
    assert "answered 503" in shown.err
    # the gate that was done is safe and shown, the one that was not is not there
    results = load([out])
    assert [gate.gate for gate in scored(results)] == ["nano_knowledge"]
    assert len(samples_of(results, out)) == 10
    assert "nano_knowledge" in shown.out
    assert [one.status for one in results.manifests.values()] == ["stopped"]


@pytest.mark.slow
def test_an_unknown_task_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of lm-eval's tasks are searched, which takes seconds."""
    with FakeServer() as server:
        message = failing(
            capsys, "--url", server.url, "--out", str(tmp_path / "out"), "--tasks", "gpqa_dimond"
        )
    assert "--tasks gpqa_dimond: unknown; want nano, official" in message


def test_missing_data_is_an_error(nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        url = ("--url", server.url, "--out", str(tmp_path / "out"))
        message = failing(capsys, *url, "--nano", str(tmp_path / "nowhere"))
        assert str(tmp_path / "nowhere" / "reference.json") in message
        (nano / "heldout" / "instructions.jsonl").write_text('{"key": 0, "prompt":\n')
        message = failing(capsys, *url, "--nano", str(nano))
        assert "nano_instructions: the dataset" in message and "cannot be loaded" in message
        (nano / "heldout" / "reasoning.jsonl").unlink()
        message = failing(capsys, *url, "--nano", str(nano), "--tasks", "nano_reasoning")
        assert "nano_reasoning: the dataset" in message and "reasoning.jsonl" in message
        (nano / "reference.json").write_text(json.dumps({"knowledge": {"items": {}}}))
        assert "instructions.items is missing" in failing(capsys, *url, "--nano", str(nano))


@pytest.mark.parametrize("wrong", [("--limit", "1.5"), ("--limit", "few"), ("--data", "gsm8k")])
def test_wrong_options_end_it_with_2(wrong: tuple[str, str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["quality", *wrong])


def test_a_score_comes_back_as_it_was_stored() -> None:
    score = GateScore("g", 10, 20, 0.5, 0.25, 0.75, threshold=0.625, cut=2, retries=1, seconds=3.0)
    assert GateScore.of_values("g", score.values()) == score
    assert (score.verdict, replace(score, low=None, high=None, threshold=None).verdict) == ("undecided", None)
