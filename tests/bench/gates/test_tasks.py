"""lm-eval's definitions with small local copies of their datasets, which are read as the hub's are."""

import random
import re
from pathlib import Path
from typing import Any

import nltk  # type: ignore[import-untyped]
import pytest

from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.gates.chat_model import ChatModel
from qwen_serve.bench.gates.gate import MMLU_PRO_SUBJECTS, NANO_PICTURES, OFFICIAL, Gate
from qwen_serve.bench.gates.nano import nano_tasks
from qwen_serve.bench.gates.runner import GateRun, run_gate
from qwen_serve.bench.gates.tasks import Tasks, hub_tasks, other_gates, sample
from tests.bench.fake_server import Body, FakeReply, FakeServer, Script, text_of
from tests.bench.gates.data import answering, gpqa_row, instruction, question, write

GATES = {gate.name: gate for gate in OFFICIAL}


def put(server: FakeServer, gate: Gate, tasks: Tasks, limit: float | None = None) -> GateRun:
    model = ChatModel(server.url, thinking=gate.thinking, stream=gate.streamed, retries=0)
    chosen = {name: sample(task, limit, seed=0, first=False) for name, task in tasks.items()}
    return run_gate(gate, tasks, model, chosen=chosen, multiturn=True)


def mmlu_pro(folder: Path) -> Path:
    """Two questions a subject, numbers 0 to 27, and five examples each."""
    subjects = [subject.replace("_", " ") for subject in MMLU_PRO_SUBJECTS]
    write(folder / "test.jsonl", [question(2 * i + k, s) for i, s in enumerate(subjects) for k in (0, 1)])
    write(folder / "validation.jsonl", [question(900 + k, s) for s in subjects for k in range(5)])
    return folder


def test_mmlu_pro(tmp_path: Path) -> None:
    gate = GATES["mmlu_pro"]
    tasks = hub_tasks(gate, {"mmlu_pro": mmlu_pro(tmp_path)})
    wrong = {0, 1, 2}  # both of biology, one of business
    with FakeServer(Script(reply=answering(lambda _, number: number not in wrong))) as server:
        run = put(server, gate, tasks)
        assert all(len(body["messages"]) == 7 and body["max_tokens"] == 512 for _, body in server.requests)
    score = run.score
    assert score.score == pytest.approx((0 + 0.5 + 12) / 14)
    assert run.subtasks["mmlu_pro_biology"] == 0 and run.subtasks["mmlu_pro_law"] == 1
    assert (score.items, run.about["fewshot"], score.threshold, score.verdict) == (28, 5, 0.621, "pass")
    assert {one.id for one in run.samples if one.outcomes == [0.0]} == {"0", "1", "2"}


def test_ifeval(tmp_path: Path) -> None:
    gate = GATES["ifeval"]
    write(tmp_path / "train.jsonl", [instruction(n) for n in range(12)])
    with FakeServer(Script(reply=answering(lambda _, number: number != 6))) as server:
        run = put(server, gate, hub_tasks(gate, {"ifeval": tmp_path}))
    assert run.score.score == pytest.approx(13 / 15)  # request 6 has two instructions
    assert run.about["other_metrics"]["ifeval"]["prompt_level_strict_acc,none"] == pytest.approx(11 / 12)
    assert (run.score.verdict, run.about["thinking"], run.about["fewshot"]) == ("pass", False, 0)


def right_choice(body: Body) -> FakeReply:
    """Answers with the letter of the right choice, except for problems 0 and 1."""
    text = text_of(body["messages"][-1]["content"])
    letter = re.findall(r"\((.)\) right", text)[0]
    number = int(re.findall(r"Problem (\d+)", text)[0])
    wrong = {"A": "B"}.get(letter, "A")
    return FakeReply(f"So the answer is ({letter if number > 1 else wrong}).", f"Not ({wrong}).")


def test_gpqa(tmp_path: Path) -> None:
    gate = GATES["gpqa_diamond"]
    write(tmp_path / "train.jsonl", [gpqa_row(n) for n in range(10)])
    with FakeServer(Script(reply=right_choice)) as server:
        run = put(server, gate, hub_tasks(gate, {"gpqa_diamond": tmp_path}))
        bodies = [body for _, body in server.requests]
        random.seed(99)
        again = put(server, gate, hub_tasks(gate, {"gpqa_diamond": tmp_path}))
    assert all(body["stream"] and body["max_tokens"] == 12_288 for body in bodies)
    assert all(body["chat_template_kwargs"] == {"enable_thinking": True} for body in bodies)
    assert run.score.score == again.score.score == pytest.approx(0.8)
    # choices are shuffled, but the same way in every run
    assert {one.target for one in run.samples} >= {"(A)", "(B)"}
    assert [one.prompt for one in run.samples] == [one.prompt for one in again.samples]


def test_gsm8k(tmp_path: Path) -> None:
    gate = GATES["gsm8k"]
    rows = [
        {"question": f"How many in case {n}?", "answer": f"They are {n}.\n#### {n}"} for n in range(10, 18)
    ]
    write(tmp_path / "test.jsonl", rows)

    def reply(body: Body) -> FakeReply:
        number = int(re.findall(r"case (\d+)", body["messages"][-1]["content"])[0])
        return FakeReply(f"There are 2 kinds. The answer is {number if number != 12 else 3}.")

    with FakeServer(Script(reply=reply)) as server:
        run = put(server, gate, hub_tasks(gate, {"gsm8k": tmp_path}))
        assert [message["role"] for message in server.requests[0][1]["messages"]] == [
            "user",
            "assistant",
        ] * 8 + ["user"]
    assert (run.score.score, run.about["fewshot"], run.score.verdict) == (7 / 8, 8, "pass")


def test_a_sample_is_a_fair_draw_and_grows_with_its_size(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [instruction(n) for n in range(60)])
    (task,) = hub_tasks(GATES["ifeval"], {"ifeval": tmp_path}).values()
    assert sample(task, None, seed=0, first=False) == list(range(60))
    assert sample(task, 7, seed=0, first=True) == list(range(7))
    small, large = (set(sample(task, limit, seed=0, first=False)) for limit in (0.1, 0.5))
    assert (len(small), len(large)) == (6, 30)
    assert small < large
    assert small != set(sample(task, 0.1, seed=1, first=False)) != set(range(6))


def test_other_tasks_of_lm_eval_are_gates_without_a_threshold() -> None:
    (gate,) = other_gates("gsm8k_cot_zeroshot")
    assert (gate.metric, gate.thinking, gate.threshold) == ("exact_match,strict-match", None, None)
    assert [gate.name for gate in other_gates("mmlu_pro")] == [f"mmlu_pro_{s}" for s in MMLU_PRO_SUBJECTS]
    with pytest.raises(BenchError, match="multiple_choice, which a chat endpoint cannot give"):
        other_gates("gpqa_diamond_zeroshot")


def test_data_that_cannot_be_loaded(tmp_path: Path) -> None:
    gate = GATES["ifeval"]
    with pytest.raises(BenchError, match="no such folder"):
        hub_tasks(gate, {"ifeval": tmp_path / "nowhere"})
    with pytest.raises(BenchError, match=r"ifeval: the dataset .* cannot be loaded"):
        hub_tasks(gate, {"ifeval": tmp_path})  # an empty folder
    write(tmp_path / "train.jsonl", [{"prompt": "Half a row."}])
    with pytest.raises(BenchError, match="first row cannot be scored: KeyError"):
        hub_tasks(gate, {"ifeval": tmp_path})


def test_missing_scoring_data_is_found_before_the_asking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(*_: Any) -> None:
        raise LookupError

    row = instruction(0) | {
        "instruction_id_list": ["length_constraints:number_sentences"],
        "kwargs": [{"num_sentences": 3, "relation": "at least"}],
    }
    write(tmp_path / "train.jsonl", [row])
    monkeypatch.setattr(nltk.data, "find", find)
    with pytest.raises(BenchError, match="number_sentences takes nltk's punkt_tab"):
        hub_tasks(GATES["ifeval"], {"ifeval": tmp_path})


def test_questions_about_pictures(tmp_path: Path) -> None:
    """nano's gate: each question comes after its picture, and the answer is one word."""
    rows = [
        {
            "id": n,
            "kind": "shape",
            "question": f"Which shape is {n}?",
            "answer": "ring",
            "picture": f"data:{n}",
        }
        for n in range(8)
    ]
    write(tmp_path / "heldout" / "pictures.jsonl", rows)
    gate = Gate(NANO_PICTURES, (NANO_PICTURES,), "exact_match,none", thinking=False, max_tokens=16)

    def reply(body: Body) -> FakeReply:
        picture, question = body["messages"][-1]["content"]
        number = int(picture["image_url"]["url"].removeprefix("data:"))
        assert question["text"] == f"Which shape is {number}?"
        return FakeReply("Ring." if number < 6 else "a ring")

    with FakeServer(Script(reply=reply)) as server:
        run = put(server, gate, nano_tasks(gate, tmp_path))
        assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for _, body in server.requests)
    assert run.score.score == pytest.approx(6 / 8)
    assert {one.id for one in run.samples} == {str(n) for n in range(8)}
