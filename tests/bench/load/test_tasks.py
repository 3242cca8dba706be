"""Held-out tasks are drawn from every family."""

from pathlib import Path

import pytest

from bench.errors import BenchError
from bench.load.tasks import HELDOUT, read_tasks
from models.nano.train import heldout


def test_tasks_are_drawn_from_every_family_and_reasoning_twice() -> None:
    tasks = read_tasks(HELDOUT, 6, seed=1)
    assert tasks == read_tasks(HELDOUT, 6, seed=1)
    assert tasks != read_tasks(HELDOUT, 6, seed=2)
    groups = [task.group for task in tasks]
    assert groups.count("knowledge") == groups.count("instructions") == groups.count("reasoning") == 6
    assert groups.count("reasoning, thinking") == 6
    assert groups.count("continuation") + groups.count("repeated text") == 6
    assert all(bool(task.messages) != bool(task.prompt) for task in tasks)


def test_the_prompts_are_those_of_the_reference() -> None:
    shots = heldout.read(HELDOUT, heldout.SHOTS_FILE)
    known = [
        tuple(messages)
        for family in heldout.FAMILIES
        for row in heldout.read(HELDOUT, family)
        if (messages := heldout.messages(row, family, shots)) is not None
    ]
    assert all(task.messages in known for task in read_tasks(HELDOUT, 6, seed=1) if task.messages)


def test_a_folder_without_tasks_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"knowledge\.jsonl cannot be read"):
        read_tasks(tmp_path, 1, seed=0)
    (tmp_path / "knowledge.jsonl").write_text('{"question": "why?", "category": "law"}\n')
    (tmp_path / "knowledge_shots.jsonl").write_text("")
    with pytest.raises(BenchError, match=r"not a task of this family: KeyError\('options'\)"):
        read_tasks(tmp_path, 1, seed=0)
