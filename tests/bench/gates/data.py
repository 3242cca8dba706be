"""Small datasets with the benchmarks' fields, and a chat that answers chosen items correctly."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench.fake_server import Body, FakeReply, text_of, thinks

Row = dict[str, Any]
LETTERS = "ABCDEFGHIJ"

# (request, instruction ids, keyword arguments, a reply that follows all of them, one that follows none)
INSTRUCTIONS: tuple[tuple[str, list[str], list[Row], str, str], ...] = (
    ("Say it small.", ["change_case:english_lowercase"], [{}], "all of this is small.", "NOT SMALL AT ALL."),
    ("No commas here.", ["punctuation:no_comma"], [{}], "None to see.", "One, two."),
    (
        "Say moon twice, end with Bye.",
        ["keywords:frequency", "startend:end_checker"],
        [{"keyword": "moon", "frequency": 2, "relation": "at least"}, {"end_phrase": "Bye."}],
        "The moon is a moon. Bye.",
        "Nothing.",
    ),
    ("Put a title.", ["detectable_format:title"], [{}], "<<Title>>\nText.", "Text."),
)


def write(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def question(number: int, category: str) -> Row:
    """An item of MMLU-Pro. The answer is the letter of the number."""
    letter = LETTERS[number % 10]
    return {
        "question_id": number,
        "category": category,
        "question": f"What is thing number {number}?",
        "options": [f"option {i}" for i in range(10)],
        "answer": letter,
        "answer_index": number % 10,
        "cot_content": f"A: Let's think step by step. It is thing {number}. The answer is ({letter}).",
        "src": "test",
    }


def instruction(number: int) -> Row:
    """An item of IFEval."""
    prompt, names, arguments, _, _ = INSTRUCTIONS[number % len(INSTRUCTIONS)]
    return {
        "key": number,
        "prompt": f"Request {number}. {prompt}",
        "instruction_id_list": names,
        "kwargs": arguments,
    }


def problem(number: int) -> Row:
    """A processed item of GPQA. The answer is the letter of the number."""
    choices = {f"choice{i + 1}": f"result {number + i}" for i in range(4)}
    return {"id": number, "Question": f"Problem {number}?", **choices, "answer": f"({LETTERS[number % 4]})"}


def gpqa_row(number: int) -> Row:
    """A row of GPQA's dataset."""
    wrong = {f"Incorrect Answer {i}": f"wrong {number} {i}" for i in (1, 2, 3)}
    return {"Question": f"Problem {number}?", "Correct Answer": f"right {number}", **wrong}


def nano_folder(folder: Path, reference: Mapping[str, Mapping[str, Any]]) -> Path:
    """A model's folder: 6 questions on people, 4 on places, 8 instructions, 8 problems, and its reference."""
    held_out = folder / "heldout"
    numbers = {"people": range(6), "places": range(6, 10)}
    write(held_out / "knowledge.jsonl", [question(n, c) for c, of in numbers.items() for n in of])
    shots = [
        question(n, c) for c, first in (("people", 100), ("places", 200)) for n in range(first, first + 5)
    ]
    write(held_out / "knowledge_shots.jsonl", shots)
    write(held_out / "instructions.jsonl", [instruction(n) for n in range(8)])
    write(held_out / "reasoning.jsonl", [problem(n) for n in range(8)])
    content = {name: {"items": items} for name, items in reference.items()}
    (folder / "reference.json").write_text(json.dumps({"implementation": "a test", **content}))
    return folder


def all_right() -> dict[str, dict[str, Any]]:
    """A reference with only right answers."""
    return {
        "knowledge": {str(n): True for n in range(10)},
        "instructions": {str(n): [True] * len(instruction(n)["kwargs"]) for n in range(8)},
        "reasoning": {str(n): True for n in range(8)},
    }


def number_in(text: str, before: str) -> int:
    """The number after the last ``before``."""
    return int(text.rsplit(before, 1)[1].strip().split("?")[0].split(".")[0])


def answering(right: Callable[[str, int], bool]) -> Callable[[Body], FakeReply]:
    """A chat that answers item ``number`` of a family correctly if ``right(family, number)``."""

    def reply(body: Body) -> FakeReply:
        text = text_of(body["messages"][-1]["content"])
        if "thing number" in text:
            number = number_in(text, "thing number")
            letter = LETTERS[(number if right("knowledge", number) else number + 1) % 10]
            return FakeReply(f"It is thing {number}. The answer is ({letter}).")
        if "Request" in text:
            number = number_in(text, "Request")
            _, _, _, good, bad = INSTRUCTIONS[number % len(INSTRUCTIONS)]
            return FakeReply(good if right("instructions", number) else bad)
        if "Problem" in text:
            number = number_in(text, "Problem")
            letter = LETTERS[(number if right("reasoning", number) else number + 1) % 4]
            return FakeReply(f"The answer is ({letter}).", "Let me see: (A) or (B)?" if thinks(body) else "")
        return FakeReply("Hello.")

    return reply
