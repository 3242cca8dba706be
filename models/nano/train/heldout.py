"""The held-out files: one JSON object a line, in the field names of the benchmarks they stand for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from models.nano.train import continuation, instructions, knowledge, pictures, reasoning
from models.nano.train.document import Messages, user

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

COUNT = 300
CONTINUATIONS = 1_200
SHOTS_FILE, PICTURES_FILE = "knowledge_shots", "pictures"
FAMILIES = ("knowledge", "instructions", "reasoning", "continuation")

Row = dict[str, Any]


def question_row(question: knowledge.Question) -> Row:
    return {
        "category": question.category,
        "question": question.question,
        "options": question.options,
        "answer": question.answer,
        "answer_index": question.answer_index,
        "cot_content": f"A: Let's think step by step. {question.worked}",
    }


def rows(name: str) -> Iterator[Row]:
    """The lines of `<name>.jsonl`; models/nano/README.md explains the fields."""
    if name == SHOTS_FILE:
        for shots in knowledge.held_out_shots().values():
            yield from map(question_row, shots)
    elif name == "knowledge":
        for i, question in enumerate(knowledge.held_out_questions(COUNT)):
            yield {"question_id": i, **question_row(question), "level": question.level}
    elif name == "instructions":
        for i, item in enumerate(instructions.held_out_items(COUNT)):
            yield {
                "key": i,
                "prompt": item.prompt,
                "instruction_id_list": item.instruction_ids,
                "kwargs": item.arguments,
                "reference": item.answer,
                "level": f"{len(item.instruction_ids)} constraints",
            }
    elif name == "reasoning":
        for i, problem in enumerate(reasoning.held_out_items(COUNT)):
            choices = {f"choice{n}": choice for n, choice in enumerate(problem.choices, 1)}
            yield {
                "id": i,
                "Question": problem.problem.question,
                **choices,
                "answer": f"({problem.letter})",
                "reasoning": problem.reply.reasoning,
                "level": problem.level,
            }
    elif name == PICTURES_FILE:
        for i, drawn in enumerate(pictures.held_out_items(COUNT)):
            yield {
                "id": i,
                "kind": drawn.kind,
                "question": drawn.question,
                "answer": drawn.answer,
                "picture": drawn.scene.data_url(),
            }
    else:
        for i, piece in enumerate(continuation.held_out_items(CONTINUATIONS)):
            chat = (
                {"messages": user(piece.prompt)} if piece.kind == "arithmetic" else {"prompt": piece.prompt}
            )
            row = {
                "id": i,
                "kind": piece.kind,
                **chat,
                "thinking": piece.thinking,
                "answer": piece.reply.answer,
            }
            yield row | ({"reasoning": piece.reply.reasoning} if piece.thinking else {})


def write(folder: Path) -> None:
    """Write every held-out file, each under a temporary name first."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*FAMILIES, SHOTS_FILE, PICTURES_FILE):
        part = folder / f"{name}.jsonl.part"
        part.write_text(
            "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows(name)), encoding="utf-8"
        )
        part.replace(folder / f"{name}.jsonl")


def read(folder: Path, name: str) -> list[Row]:
    text = (folder / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def few_shot_messages(shots: Iterable[Row], row: Row) -> Messages:
    """lm-eval's mmlu_pro chat for a row: the description, each worked example, the question."""

    def shown(question: Row) -> str:
        options = "".join(
            f"{letter}. {option}\n"
            for letter, option in zip(knowledge.LETTERS, question["options"], strict=False)
        )
        return f"Question:\n{question['question']}\nOptions:\n{options}"

    chat: Messages = [{"role": "system", "content": knowledge.description(row["category"])}]
    for shot in shots:
        chat += user(f"{shown(shot)}{shot['cot_content'].replace('A:', 'Answer:', 1)}{knowledge.GAP}")
    return chat + user(f"{shown(row)}{knowledge.ANSWER_CUE}")


def messages(row: Row, name: str, shots: Sequence[Row]) -> Messages | None:
    """The chat of a row of family `name`, None where it is raw text; `shots` are the shots file's rows."""
    if name == "knowledge":
        return few_shot_messages([s for s in shots if s["category"] == row["category"]], row)
    if name == "instructions":
        return user(row["prompt"])
    if name == "reasoning":
        return user(reasoning.message(row["Question"], [row[f"choice{n}"] for n in range(1, 5)]))
    return row.get("messages")
