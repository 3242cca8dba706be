"""Held-out tasks are drawn from every family."""

from pathlib import Path

import pytest

from bench.errors import BenchError
from bench.load.tasks import HELDOUT, read_tasks


def test_tasks_are_drawn_from_every_family_and_reasoning_twice() -> None:
    tasks = read_tasks(HELDOUT, 6, seed=1)
    assert tasks == read_tasks(HELDOUT, 6, seed=1)
    assert tasks != read_tasks(HELDOUT, 6, seed=2)
    asked = {group: len(jobs) for group, jobs in tasks.items()}
    assert asked["knowledge"] == asked["instructions"] == asked["reasoning"] == 6
    assert asked["reasoning, thinking"] == 6
    assert asked["continuation"] + asked["repeated text"] == 6
    assert {job.chat for job in tasks["repeated text"]} == {False}
    assert tasks["reasoning, thinking"][0].fields == {"chat_template_kwargs": {"enable_thinking": True}}


def test_a_folder_without_tasks_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"knowledge\.jsonl cannot be read"):
        read_tasks(tmp_path, 1, seed=0)
    (tmp_path / "knowledge.jsonl").write_text('{"question": "why?"}\n')
    with pytest.raises(BenchError, match=r"not a task of this family: KeyError\('options'\)"):
        read_tasks(tmp_path, 1, seed=0)
