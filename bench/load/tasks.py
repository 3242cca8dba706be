"""Held-out tasks as a workload, one greedy request at a time: texts that mean something, as drafts need them.

The families are those of ``models/nano/heldout``. A cell is a family; reasoning counts with thinking and
without, and texts that repeat themselves apart from other continuations.
"""

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from bench.load.cell import LOADED, Cell, Supply
from bench.load.generator import Job

HELDOUT = Path(__file__).resolve().parents[2] / "models" / "nano" / "heldout"
FAMILIES = ("knowledge", "instructions", "reasoning", "continuation")


def task_cells(folder: Path, items: int, supply: Supply, *, max_tokens: int, rounds: int) -> list[Cell]:
    """A cell for each group, ``items`` tasks of each family. Raises BenchError for a folder without them."""
    return [
        _cell(group, jobs, supply, max_tokens, rounds)
        for group, jobs in read_tasks(folder, items, supply.options.seed).items()
    ]


def _cell(group: str, jobs: list[Job], supply: Supply, max_tokens: int, rounds: int) -> Cell:
    async def make(round: int) -> list[Job]:
        return jobs if round else jobs[:1]

    kept = {*LOADED, "ms_per_token"}
    return Cell(
        workload="tasks",
        name=group,
        rounds=rounds,
        make=make,
        supply=supply,
        max_tokens=max_tokens,
        kept=kept,
    )


def read_tasks(folder: Path, items: int, seed: int) -> dict[str, list[Job]]:
    """By group, ``items`` held-out tasks of each family, drawn with a seed.

    Raises BenchError where a file is missing or has other fields.
    """
    tasks: dict[str, list[Job]] = {}
    for family in FAMILIES:
        path = folder / f"{family}.jsonl"
        try:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        except OSError as error:
            raise BenchError(f"--tasks: {path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise BenchError(f"--tasks: {path}: a line is not JSON: {error}") from error
        for row in random.Random(f"{seed} {family}").sample(rows, min(items, len(rows))):
            try:
                for group, job in _jobs_of(row, family):
                    tasks.setdefault(group, []).append(job)
            except (KeyError, TypeError) as error:
                raise BenchError(f"{path}: not a task of this family: {error!r} is missing") from error
    return tasks


def _jobs_of(row: Mapping[str, Any], family: str) -> Iterator[tuple[str, Job]]:
    if family == "continuation" and "messages" not in row:
        yield "repeated text", Job((row["prompt"],), chat=False)
        return
    text = _question(row, family)
    yield family, _chat(text, thinking=bool(row.get("thinking")))
    if family == "reasoning":
        yield "reasoning, thinking", _chat(text, thinking=True)


def _chat(text: str, *, thinking: bool) -> Job:
    return Job((text,), chat=True, fields={"chat_template_kwargs": {"enable_thinking": thinking}})


def _question(row: Mapping[str, Any], family: str) -> str:
    if family == "continuation":
        return str(row["messages"][-1]["content"])
    if family == "instructions":
        return str(row["prompt"])
    if family == "knowledge":
        options = "\n".join(f"{chr(65 + i)}. {option}" for i, option in enumerate(row["options"]))
        return f"Question: {row['question']}\nOptions:\n{options}\nAnswer: Let's think step by step."
    choices = "\n".join(f"({'ABCD'[i]}) {row[f'choice{i + 1}']}" for i in range(4))
    return f"What is the correct answer to this question:{row['Question']}\nChoices:\n{choices}"
