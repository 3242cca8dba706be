"""Items with their whole replies, as JSON lines beside a run's rows."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from qwen_serve.bench.errors import BenchError


class Sample(BaseModel):
    """An item with its answer and score. ``prompt``: the last message, after ``earlier_messages``.

    ``outcomes``: the metric's values for the answer; ``reference``: those of the full-precision model's.
    """

    model_config = ConfigDict(extra="forbid")

    gate: str
    task: str
    id: str
    earlier_messages: int
    prompt: str
    target: str
    reasoning: str
    answer: str
    extracted: str
    outcomes: list[float]
    reference: list[float] | None
    finish_reason: str | None
    truncated_thinking: bool
    prompt_tokens: int | None
    completion_tokens: int | None
    seconds: float
    retries: int


def append_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Append a gate's samples to the file."""
    with path.open("a", encoding="utf-8") as lines:
        lines.write("".join(one.model_dump_json() + "\n" for one in samples))


def read_samples(path: Path) -> list[Sample]:
    """All samples in the file. Raises BenchError if it cannot be read."""
    try:
        with path.open(encoding="utf-8") as lines:
            return [Sample.model_validate_json(line) for line in lines]
    except (OSError, ValidationError) as error:
        raise BenchError(f"{path}: not a file of samples: {error}") from error
