"""Held-out tasks are drawn from every family."""

from pathlib import Path

import pytest

from bench.errors import BenchError
from bench.load.tasks import HELDOUT, read_tasks


def test_tasks_are_drawn_from_every_family_and_reasoning_twice() -> None:
    tasks = read_tasks(HELDOUT, 6, seed=1)
    assert tasks == read_tasks(HELDOUT, 6, seed=1)
    assert tasks != read_tasks(HELDOUT, 6, seed=2)
    groups = [task.group for task in tasks]
    assert groups.count("knowledge") == groups.count("instructions") == groups.count("reasoning") == 6
    assert groups.count("reasoning, thinking") == 6
    assert groups.count("continuation") + groups.count("repeated text") == 6
    assert all(bool(task.messages) != bool(task.prompt) for task in tasks)


def test_a_folder_without_tasks_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"knowledge\.jsonl cannot be read"):
        read_tasks(tmp_path, 1, seed=0)
    (tmp_path / "knowledge.jsonl").write_text('{"question": "why?"}\n')
    with pytest.raises(BenchError, match=r"not a task of this family: KeyError\('options'\)"):
        read_tasks(tmp_path, 1, seed=0)
