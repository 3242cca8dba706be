"""Held-out tasks as a workload, one greedy request at a time. Drafts need meaningful texts.

A cell is one of nano's quality gates, with the gate's prompts, shots and thinking, or texts to continue: sums
in a chat, or raw text that repeats itself.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.load.cell import LOADED, Cell, PromptSource
from qwen_serve.bench.load.generator import Job


def task_cells(folder: Path, items: int, source: PromptSource, *, max_tokens: int, rounds: int) -> list[Cell]:
    """A cell for each group of tasks. Raises BenchError for a folder without tasks."""
    return [
        _cell(group, jobs, source, max_tokens, rounds)
        for group, jobs in read_tasks(folder, items, source.options.seed).items()
    ]


def _cell(group: str, jobs: list[Job], source: PromptSource, max_tokens: int, rounds: int) -> Cell:
    async def make(round: int) -> list[Job]:
        return jobs if round else jobs[:1]

    kept = {*LOADED, "ms_per_token"}
    return Cell(
        workload="tasks",
        name=group,
        rounds=rounds,
        make=make,
        source=source,
        max_tokens=max_tokens,
        kept=kept,
    )


def read_tasks(folder: Path, items: int, seed: int) -> dict[str, list[Job]]:
    """``items`` tasks of each gate without pictures, by gate, drawn with ``seed``; and as many texts to
    continue, by kind.

    ``folder``: a model's folder with heldout/ and reference.json. Raises BenchError if a file is missing or
    has other fields.
    """
    from qwen_serve.bench.gates import nano  # lm-eval takes seconds to import
    from qwen_serve.bench.gates.gate import NANO_PICTURES
    from qwen_serve.bench.gates.tasks import messages

    found: dict[str, list[Job]] = {}
    for gate in nano.nano_gates(folder, nano.read_reference(folder)):
        if gate.name == NANO_PICTURES:
            continue
        tasks = nano.nano_tasks(gate, folder).values()
        asked = [(task, number) for task in tasks for number in range(len(task.eval_docs))]
        chosen = random.Random(f"{seed} {gate.name}").sample(asked, min(items, len(asked)))
        found[gate.name] = [_chat(messages(task, number), gate.thinking) for task, number in chosen]
    path = folder / "heldout" / "continuation.jsonl"
    rows = nano.read_items(path)
    for row in random.Random(f"{seed} continuation").sample(rows, min(items, len(rows))):
        try:
            if "messages" in row:
                found.setdefault("continuation", []).append(_chat(row["messages"], bool(row["thinking"])))
            else:
                found.setdefault("repeated text", []).append(Job((row["prompt"],), chat=False))
        except KeyError as error:
            raise BenchError(f"{path}: not a text to go on with: {error} is missing") from error
    return found


def _chat(messages: Sequence[Mapping[str, str]], thinking: bool | None) -> Job:
    fields: dict[str, Any] = {}
    if thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": thinking}
    *before, last = messages
    return Job((last["content"],), chat=True, before=tuple(before), fields=fields)
