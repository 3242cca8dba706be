"""Held-out tasks have the same prompts as in the quality gates and in the reference's record."""

import json
from pathlib import Path
from shutil import copytree

import pytest

from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.gates.gate import NANO_FOLDER, NANO_NAMES
from qwen_serve.bench.load.tasks import read_tasks
from tests import heldout


def test_tasks_are_drawn_from_every_gate() -> None:
    tasks = read_tasks(NANO_FOLDER, 6, seed=1)
    assert tasks == read_tasks(NANO_FOLDER, 6, seed=1)
    assert tasks != read_tasks(NANO_FOLDER, 6, seed=2)
    asked = {group: len(jobs) for group, jobs in tasks.items()}
    assert [asked[gate] for gate in NANO_NAMES] == [6, 6, 6]
    assert asked["continuation"] + asked["repeated text"] == 6
    assert {job.chat for job in tasks["repeated text"]} == {False}


def test_prompts_shots_and_thinking_are_those_of_the_reference() -> None:
    """For every item of the gates; shots are messages before the question."""
    tasks = read_tasks(NANO_FOLDER, 1_000, seed=0)
    recorded = json.loads((NANO_FOLDER / "reference.json").read_text(encoding="utf-8"))
    shots = heldout.read(heldout.SHOTS)
    for gate in NANO_NAMES:
        family = gate.removeprefix("nano_")
        asked = [[*job.before, {"role": "user", "content": job.turns[0]}] for job in tasks[gate]]
        known = [heldout.messages(row, family, shots) for row in heldout.read(family)]
        assert sorted(map(json.dumps, asked)) == sorted(map(json.dumps, known))
        thinking = {"chat_template_kwargs": {"enable_thinking": recorded[family]["thinking"]}}
        assert all(job.fields == thinking for job in tasks[gate])


def test_a_folder_without_tasks_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"reference\.json: the recorded .* cannot be read"):
        read_tasks(tmp_path, 1, seed=0)
    copytree(NANO_FOLDER / "heldout", tmp_path / "heldout")
    (tmp_path / "reference.json").write_bytes((NANO_FOLDER / "reference.json").read_bytes())
    (tmp_path / "heldout" / "continuation.jsonl").write_text('{"question": "why?"}\n')
    with pytest.raises(BenchError, match="not a text to go on with: 'prompt' is missing"):
        read_tasks(tmp_path, 1, seed=0)
