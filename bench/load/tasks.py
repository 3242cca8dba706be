"""Held-out tasks as a workload, one greedy request at a time: texts that mean something, as drafts need them.

The families are those of ``models/nano/heldout``, with the gates' own prompts and shots. A cell is a family;
reasoning counts with thinking and without, and texts that repeat themselves apart from other continuations.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.errors import BenchError
from bench.load.cell import Cell, Measured, Supply, Target
from bench.load.client import Completion
from bench.load.generator import Sent, values_of
from bench.terminal import Bar

HELDOUT = Path(__file__).resolve().parents[2] / "models" / "nano" / "heldout"
FAMILIES = ("knowledge", "instructions", "reasoning", "continuation")
WORKLOAD = "tasks"


@dataclass(frozen=True, slots=True)
class Task:
    """A request: messages, or a text to be continued as it is; and the group that it counts in."""

    group: str
    messages: tuple[Mapping[str, str], ...] = ()
    thinking: bool = False
    prompt: str | None = None

    def request(self, max_tokens: int, model: str | None) -> tuple[str, dict[str, Any]]:
        """(path, body)."""
        body: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0}
        if model is not None:
            body["model"] = model
        if self.prompt is not None:
            return "/v1/completions", {**body, "prompt": self.prompt}
        template = {"enable_thinking": self.thinking}
        return "/v1/chat/completions", {
            **body,
            "messages": list(self.messages),
            "chat_template_kwargs": template,
        }


class TaskCell(Cell):
    """All tasks of a group; every round asks them again."""

    workload = WORKLOAD

    def __init__(self, group: str, tasks: Sequence[Task], supply: Supply, *, max_tokens: int) -> None:
        self.name = group
        self._tasks = tasks
        self._supply = supply
        self._max_tokens = max_tokens

    def requests(self) -> int:
        return len(self._tasks)

    async def prepare(self, rounds: int) -> None:
        """The tasks are read already."""

    async def warm_up(self, target: Target, *, again: bool = False) -> None:
        if not again:
            await self._ask(target, self._tasks[0])

    async def measure(self, target: Target, round: int, bar: Bar) -> Measured:
        began = perf_counter()
        rows: list[dict[str, float]] = []
        answers: list[str | None] = []
        errors: list[str] = []
        for number, task in enumerate(self._tasks):
            planned = perf_counter() - began
            answer: Completion | None = None
            error: str | None = None
            try:
                answer = await self._ask(target, task)
            except BenchError as failure:
                error = str(failure)
                errors.append(error)
            sent = Sent(number, 0, planned, 0.0, perf_counter() - began, answer, error)
            values = await values_of(sent, self._supply.vocabulary)
            if values.get("verified_tokens"):
                values["ms_per_token"] = values["latency"] / values["verified_tokens"]
            rows.append(values)
            answers.append(sent.text if answer is not None else None)
            bar.advance()
        return Measured(rows, answers, f"{perf_counter() - began:.1f} s", errors)

    async def _ask(self, target: Target, task: Task) -> Completion:
        path, body = task.request(self._max_tokens, target.model)
        return await target.client.complete(path, body)


def task_cells(folder: Path, items: int, supply: Supply, *, max_tokens: int) -> list[Cell]:
    """A cell for each group, ``items`` tasks of each family. Raises BenchError for a folder without them."""
    tasks = read_tasks(folder, items, supply.options.seed)
    groups = dict.fromkeys(task.group for task in tasks)
    return [
        TaskCell(group, [task for task in tasks if task.group == group], supply, max_tokens=max_tokens)
        for group in groups
    ]


def read_tasks(folder: Path, items: int, seed: int) -> list[Task]:
    """``items`` held-out tasks of each family, drawn with a seed.

    Raises BenchError where a file is missing or has other fields.
    """
    tasks: list[Task] = []
    for family in FAMILIES:
        path = folder / f"{family}.jsonl"
        rows = list(_rows(path))
        shots = list(_rows(folder / "knowledge_shots.jsonl")) if family == "knowledge" else []
        for row in random.Random(f"{seed} {family}").sample(rows, min(items, len(rows))):
            try:
                tasks += _tasks_of(row, family, shots)
            except (KeyError, TypeError) as error:
                raise BenchError(f"{path}: not a task of this family: {error!r} is missing") from error
    return tasks


def _tasks_of(row: Mapping[str, Any], family: str, shots: Sequence[Mapping[str, Any]]) -> Iterator[Task]:
    if family == "continuation" and "messages" not in row:
        yield Task(group="repeated text", prompt=row["prompt"])
        return
    messages = _messages(row, family, shots)
    yield Task(group=family, messages=messages, thinking=bool(row.get("thinking")))
    if family == "reasoning":
        yield Task(group="reasoning, thinking", messages=messages, thinking=True)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BenchError(f"--tasks: {path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise BenchError(f"{path}, line {number}: not JSON: {error}") from error


def _messages(
    row: Mapping[str, Any], family: str, shots: Sequence[Mapping[str, Any]]
) -> tuple[Mapping[str, str], ...]:
    """The chat that the gates of this family send: lm-eval's of mmlu_pro, ifeval and gpqa."""
    if family == "continuation":
        return tuple(row["messages"])
    if family == "instructions":
        return ({"role": "user", "content": row["prompt"]},)
    if family == "reasoning":
        choices = "".join(f"({'ABCD'[i]}) {row[f'choice{i + 1}']}\n" for i in range(4))
        asked = f"What is the correct answer to this question:{row['Question']}\nChoices:\n{choices}"
        return ({"role": "user", "content": f"{asked}Let's think step by step: "},)
    system = (
        f"The following are multiple choice questions (with answers) about {row['category']}. Think step by "
        'step and then finish your answer with "the answer is (X)" where X is the correct letter choice.\n'
    )
    examples = [
        _question(shot) + shot["cot_content"].replace("A:", "Answer:", 1) + "\n\n"
        for shot in shots
        if shot["category"] == row["category"]
    ]
    texts = [*examples, f"{_question(row)}Answer: Let's think step by step."]
    return ({"role": "system", "content": system}, *({"role": "user", "content": text} for text in texts))


def _question(row: Mapping[str, Any]) -> str:
    options = "".join(f"{chr(65 + i)}. {option}\n" for i, option in enumerate(row["options"]))
    return f"Question:\n{row['question']}\nOptions:\n{options}"
