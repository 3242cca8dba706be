"""What a run of the gates leaves behind: scores in a result file, every reply beside it."""

from pathlib import Path

from bench.gates.gate import Verdict
from bench.results import Record, ResultFile


class GateScore(Record):
    """A gate's score and how it came about. Scores are shares of 1; ``low`` and ``high`` bound 95%.

    ``cut``: replies that ran into ``max_tokens``; ``truncated_thinking``: those of them that were still
    thinking; ``empty``: replies without an answer. ``reference_score``: the recorded full-precision model on
    the same items. ``other_metrics``: lm-eval's own aggregates by task.
    """

    gate: str
    metric: str
    fewshot: int
    thinking: bool | None
    streamed: bool
    max_tokens: int | None
    items: int
    items_in_all: int
    score: float
    low: float | None
    high: float | None
    threshold: float | None
    baseline: float | None
    verdict: Verdict | None
    reference_score: float | None
    cut: int
    truncated_thinking: int
    empty: int
    retries: int
    prompt_tokens: int | None
    completion_tokens: int | None
    seconds: float
    subtasks: dict[str, float]
    other_metrics: dict[str, dict[str, float]]


class Sample(Record):
    """One item asked, answered and scored. ``prompt`` is the last message, after ``earlier_messages``.

    ``outcomes`` are what the metric made of the answer, ``reference`` the recorded full-precision model's.
    """

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


class QualityResult(ResultFile):
    """The gates' scores. ``samples`` names the file beside it with every reply, one JSON object a line."""

    limit: float | None
    seed: int
    first: bool
    concurrency: int
    fewshot_as_multiturn: bool
    samples: str | None
    gates: list[GateScore]


def samples_path(out: Path) -> Path:
    """Where the replies of a result file lie."""
    return out.with_suffix(".samples.jsonl")


def read_samples(out: Path) -> list[Sample]:
    """The replies that belong to the result file ``out``."""
    with samples_path(out).open(encoding="utf-8") as lines:
        return [Sample.model_validate_json(line) for line in lines]
