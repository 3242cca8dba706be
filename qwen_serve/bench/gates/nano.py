"""Gates on the bundled model's held-out items, in the official gates' formats, with recorded outcomes of the
full-precision model; and questions about pictures, which no official gate has.

Prompts, few-shot format, filters, metrics and scorers are those of lm-eval's mmlu_pro, ifeval and gpqa; only
the data differ. Thresholds are shares of the model's full-precision scores.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]

from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.gates.estimate import estimate
from qwen_serve.bench.gates.gate import NANO_NAMES, NANO_PICTURES, Gate
from qwen_serve.bench.gates.tasks import Config, Tasks, definition, make_task

SHARES = {"nano_knowledge": 0.90, "nano_instructions": 0.95, "nano_reasoning": 0.90, NANO_PICTURES: 0.95}
THINKING_TOKENS = 2_048  # ten times the length of the data's worked answers
CATEGORY_PREFIX = "nano_knowledge_"


Recorded = Mapping[str, list[float]]  # outcomes by item id


@dataclass(frozen=True, slots=True)
class Reference:
    """Recorded outcomes of the full-precision model with greedy sampling, by gate and item id."""

    about: str
    outcomes: Mapping[str, Recorded]


def read_reference(folder: Path) -> Reference:
    """Read ``reference.json`` in a model's folder. Raises BenchError, which names what is missing."""
    path = folder / "reference.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchError(f"{path}: the recorded full-precision answers cannot be read: {error}") from error
    outcomes: dict[str, Recorded] = {}
    for name in (*NANO_NAMES, NANO_PICTURES):
        if name == NANO_PICTURES and "pictures" not in content:  # the model has no vision tower
            continue
        family = name.removeprefix("nano_")
        try:
            items = content[family]["items"]
        except (KeyError, TypeError) as error:
            raise BenchError(f"{path}: {family}.items is missing") from error
        outcomes[name] = {
            key: [float(one) for one in (value if isinstance(value, list) else [value])]
            for key, value in items.items()
        }
    return Reference(str(content.get("implementation", "")), outcomes)


def read_items(path: Path) -> list[dict[str, Any]]:
    """Read a file of held-out items, one JSON object a line. Raises BenchError if it cannot be read."""
    try:
        with path.open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        raise BenchError(f"{path}: the held-out items cannot be read: {error}") from error


def nano_gates(folder: Path, reference: Reference) -> list[Gate]:
    """The gates in ``reference``. Thresholds are shares of its score on all held-out items."""
    questions = read_items(folder / "heldout" / "knowledge.jsonl")
    subjects = {str(question["question_id"]): str(question["category"]) for question in questions}
    subtasks = tuple(CATEGORY_PREFIX + subject for subject in sorted(set(subjects.values())))
    gates = (
        Gate("nano_knowledge", subtasks, "exact_match,custom-extract", thinking=False, max_tokens=512),
        Gate(
            "nano_instructions",
            ("nano_instructions",),
            "inst_level_strict_acc,none",
            thinking=False,
            max_tokens=512,
        ),
        Gate(
            "nano_reasoning",
            ("nano_reasoning",),
            "exact_match,flexible-extract",
            thinking=True,
            max_tokens=THINKING_TOKENS,
        ),
        Gate(NANO_PICTURES, (NANO_PICTURES,), "exact_match,none", thinking=False, max_tokens=16),
    )
    scored: list[Gate] = []
    for gate in gates:
        if gate.name not in reference.outcomes:
            continue
        known = reference.outcomes[gate.name]
        if gate.name == "nano_knowledge":
            strata = [
                [
                    known[key]
                    for key, subject in subjects.items()
                    if CATEGORY_PREFIX + subject == task and key in known
                ]
                for task in gate.tasks
            ]
        else:
            strata = [list(known.values())]
        if not all(strata):
            raise BenchError(f"{folder / 'reference.json'}: {gate.name} has no outcome for a whole subtask")
        scored.append(gate.against(estimate(strata).score, SHARES[gate.name]))
    return scored


def nano_tasks(gate: Gate, folder: Path) -> Tasks:
    """The tasks of one of `nano_gates`, with the files in ``folder``/heldout."""
    return BUILDERS[gate.name](gate, folder / "heldout")


def knowledge_tasks(gate: Gate, files: Path) -> Tasks:
    """MMLU-Pro's format: a task for each category, five examples before each question."""
    shape = definition("mmlu_pro_biology")
    tasks: Tasks = {}
    for name in gate.tasks:
        category = name.removeprefix(CATEGORY_PREFIX)
        config = shape | local(test=files / "knowledge.jsonl", validation=files / "knowledge_shots.jsonl")
        config["description"] = shape["description"].replace("biology", category)
        config["process_docs"] = only(category)
        tasks[name] = make_task(name, config, gate)
    return tasks


def instruction_tasks(gate: Gate, files: Path) -> Tasks:
    """IFEval's format."""
    config = definition("ifeval") | local(train=files / "instructions.jsonl")
    return {gate.name: make_task(gate.name, config, gate)}


def reasoning_tasks(gate: Gate, files: Path) -> Tasks:
    """GPQA's format, with the choices in the file's order."""
    config = definition("gpqa_diamond_cot_zeroshot") | local(train=files / "reasoning.jsonl")
    config["process_docs"] = with_choices
    return {gate.name: make_task(gate.name, config, gate)}


def picture_tasks(gate: Gate, files: Path) -> Tasks:
    """Questions about a picture, each with an answer of one word."""
    config = local(test=files / "pictures.jsonl") | {
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "doc_to_image": lambda row: [row["picture"]],
        "generation_kwargs": {"until": [], "do_sample": False},
        "metric_list": [
            {
                "metric": "exact_match",
                "aggregation": "mean",
                "higher_is_better": True,
                "ignore_case": True,
                "ignore_punctuation": True,
            }
        ],
    }
    return {gate.name: make_task(gate.name, config, gate)}


BUILDERS: dict[str, Callable[[Gate, Path], Tasks]] = {
    "nano_knowledge": knowledge_tasks,
    "nano_instructions": instruction_tasks,
    "nano_reasoning": reasoning_tasks,
    NANO_PICTURES: picture_tasks,
}


def local(**splits: Path) -> Config:
    """The dataset part of a definition, for JSONL files."""
    files = {split: str(path) for split, path in splits.items()}
    return {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}


def only(category: str) -> Callable[[datasets.Dataset], datasets.Dataset]:
    """A filter that keeps one category's questions."""
    return lambda rows: rows.filter(lambda row: row["category"] == category)


def with_choices(rows: datasets.Dataset) -> datasets.Dataset:
    """Add the list of choices that GPQA's filter reads."""
    return rows.map(lambda row: {"choices": [row[f"choice{number}"] for number in range(1, 5)]})
