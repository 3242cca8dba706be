"""Options of the gates: the server, the tasks, and the number of items."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from qwen_serve.bench.arguments import (
    GATES_GROUP,
    SERVER_GROUP,
    Natural,
    Positive,
    ServerOptions,
    parsed_by,
    repeated,
)
from qwen_serve.bench.gates.gate import NANO_FOLDER

ALL = "all"


def read_limit(text: str) -> float | None:
    """A share in (0, 1), a whole number of at least 1, or "all" (None); ValueError otherwise."""
    if text == ALL:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (0 < value < 1 or (value >= 1 and value == int(value))):
        raise ValueError(f"{text}: want a share below 1, a whole number of at least 1, or all")
    return value


def gate_folder(text: str) -> tuple[str, Path]:
    """GATE=FOLDER; ValueError otherwise."""
    name, equals, folder = text.partition("=")
    if not equals:
        raise ValueError(f"{text}: want GATE=FOLDER")
    return name, Path(folder)


Limit = Annotated[float | None, parsed_by(read_limit)]
Data = Annotated[tuple[tuple[str, Path], ...], repeated(gate_folder)]


@Parameter(name="*", group=SERVER_GROUP)
@dataclass(frozen=True, kw_only=True)
class GateServer(ServerOptions):
    """The server that is asked, with a timeout for long thinking."""

    timeout: float = 3600.0
    """Seconds a request may take."""


@Parameter(name="*", group=GATES_GROUP)
@dataclass(frozen=True, kw_only=True)
class GateOptions:
    """Which gates are asked, and how."""

    tasks: str = "nano"
    """nano, official, gates (mmlu_pro, ifeval, gpqa_diamond, gsm8k, nano_knowledge, nano_instructions,
    nano_reasoning, nano_pictures), or tasks of lm-eval that generate text."""
    limit: Limit = None
    """Items of each subtask: a share below 1, a number, or all (default)."""
    seed: int = 0
    """Seed for drawing the items of a limited run."""
    first: Annotated[bool, Parameter(negative=())] = False
    """Take the first items, as lm-eval's own --limit does, instead of drawing them."""
    concurrency: Positive = 8
    """Concurrent requests."""
    retries: Natural = 4
    """Further attempts after a transient failure."""
    single_turn: Annotated[bool, Parameter(negative=())] = False
    """Few-shot examples in one message with the question (default: a message each, as in lm-eval)."""
    data: Data = ()
    """GATE=FOLDER: a dataset's local copy in Hugging Face's layout, instead of the hub; may be repeated."""
    nano: Path = NANO_FOLDER
    """A model's folder with heldout/ and reference.json, for the nano gates."""

    def settings(self) -> dict[str, Any]:
        """The settings that affect scores, for the manifest."""
        return {
            "tasks": self.tasks,
            "limit": self.limit,
            "gate_seed": self.seed,
            "first": self.first,
            "concurrency": self.concurrency,
            "single_turn": self.single_turn,
            "data": {name: str(folder) for name, folder in self.data},
        }
