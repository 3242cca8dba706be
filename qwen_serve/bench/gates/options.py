"""Options of the gates: server, tasks, and number of items."""

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
    """Parse a share in (0, 1), an integer of at least 1, or "all" (None). Raises ValueError."""
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
    """Parse GATE=FOLDER. Raises ValueError."""
    name, equals, folder = text.partition("=")
    if not equals:
        raise ValueError(f"{text}: want GATE=FOLDER")
    return name, Path(folder)


Limit = Annotated[float | None, parsed_by(read_limit)]
Data = Annotated[tuple[tuple[str, Path], ...], repeated(gate_folder)]


@Parameter(name="*", group=SERVER_GROUP)
@dataclass(frozen=True, kw_only=True)
class GateServer(ServerOptions):
    """The server, with a time limit for long thinking."""

    timeout: float = 3600.0
    """Time limit of a request, in seconds."""


@Parameter(name="*", group=GATES_GROUP)
@dataclass(frozen=True, kw_only=True)
class GateOptions:
    """The gates, and settings of their requests."""

    tasks: str = "nano"
    """Gates to run: nano, official, or names separated by commas: mmlu_pro, ifeval, gpqa_diamond, gsm8k,
    nano_knowledge, nano_instructions, nano_reasoning, nano_pictures, or tasks of lm-eval that generate
    text."""
    limit: Limit = None
    """Number of items of each subtask, a share of them below 1, or all (default: all)."""
    seed: int = 0
    """Seed for drawing items with --limit."""
    first: Annotated[bool, Parameter(negative=())] = False
    """Take the first items instead of drawing them, as lm-eval's own --limit does."""
    concurrency: Positive = 8
    """Number of concurrent requests."""
    retries: Natural = 4
    """Number of further attempts after a transient failure."""
    single_turn: Annotated[bool, Parameter(negative=())] = False
    """Put few-shot examples into one message with the question (default: a message for each, as in
    lm-eval)."""
    data: Data = ()
    """Local copy of a gate's dataset in Hugging Face's layout, as GATE=FOLDER; may be repeated."""
    nano: Path = NANO_FOLDER
    """Folder of a model with heldout/ and reference.json, for the nano gates."""

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
