"""The held-out items of models/nano as chats, as the reference implementation received them."""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "models" / "nano" / "heldout"
FAMILIES = ("knowledge", "instructions", "reasoning", "continuation")
SHOTS = "knowledge_shots"
LETTERS = "ABCDEFGHIJ"

Row = dict[str, Any]
Messages = list[dict[str, str]]


def read(name: str) -> list[Row]:
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def messages(row: Row, family: str, shots: list[Row]) -> Messages | None:
    """The chat of a row, in the format of mmlu_pro, ifeval or gpqa; None for raw text."""
    if family == "knowledge":
        return _five_shots(row, [shot for shot in shots if shot["category"] == row["category"]])
    if family == "instructions":
        return [{"role": "user", "content": row["prompt"]}]
    if family == "reasoning":
        choices = "".join(f"({letter}) {row[f'choice{n}']}\n" for n, letter in enumerate("ABCD", 1))
        asked = f"What is the correct answer to this question:{row['Question']}\nChoices:\n{choices}"
        return [{"role": "user", "content": f"{asked}Let's think step by step: "}]
    return row.get("messages")


def prompt_text(chat: Messages, thinking: bool) -> str:
    """The rendered chat template, up to the beginning of the model's answer."""
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content'].strip()}<|im_end|>\n" for m in chat)
    return turns + "<|im_start|>assistant\n<think>\n" + ("" if thinking else "\n</think>\n\n")


def _five_shots(row: Row, shots: list[Row]) -> Messages:
    def shown(one: Row) -> str:
        options = "".join(
            f"{letter}. {option}\n" for letter, option in zip(LETTERS, one["options"], strict=False)
        )
        return f"Question:\n{one['question']}\nOptions:\n{options}"

    about = (
        "The following are multiple choice questions (with answers) about "
        f"{row['category']}. Think step by step and then finish your answer with "
        '"the answer is (X)" where X is the correct letter choice.\n'
    )
    worked = [f"{shown(shot)}{shot['cot_content'].replace('A:', 'Answer:', 1)}\n\n" for shot in shots]
    asked = [*worked, f"{shown(row)}Answer: Let's think step by step."]
    return [{"role": "system", "content": about}, *({"role": "user", "content": text} for text in asked)]
