"""Runs one gate against one server: sends the items, scores the answers, and summarizes them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

from lm_eval.api import task as lm_eval_task
from lm_eval.evaluator import evaluate
from tqdm import tqdm

from qwen_serve.bench.gates.chat_model import Answer, ChatModel
from qwen_serve.bench.gates.estimate import Outcomes, Paired, estimate
from qwen_serve.bench.gates.gate import Gate
from qwen_serve.bench.gates.samples import Sample
from qwen_serve.bench.gates.score import GateScore
from qwen_serve.bench.gates.tasks import Tasks

# lm-eval's progress bar for building prompts: only on a terminal, and removed at the end
lm_eval_task.tqdm = partial(tqdm, desc="prompts", leave=False, disable=None)


@dataclass(frozen=True, slots=True)
class GateRun:
    """The result of `run_gate`. ``about``: settings of the requests, and lm-eval's aggregates by task;
    ``subtasks``: scores of a gate's tasks, as shares of 1, if it has several."""

    score: GateScore
    about: dict[str, Any]
    subtasks: dict[str, float]
    samples: list[Sample]


def run_gate(
    gate: Gate,
    tasks: Tasks,
    model: ChatModel,
    *,
    chosen: Mapping[str, list[int]],
    multiturn: bool,
    reference: Mapping[str, Outcomes] | None = None,
) -> GateRun:
    """Send the ``chosen`` documents of each task, and score the answers with lm-eval's filters and metrics.

    ``chosen``: document numbers by task; ``multiturn``: a message for each few-shot example, lm-eval's
    default; ``reference``: recorded outcomes by item id. Raises BenchError if a request keeps failing.
    """
    started = monotonic()
    results = evaluate(
        lm=model,
        task_dict=dict(tasks),
        samples=dict(chosen),
        bootstrap_iters=0,
        log_samples=True,
        apply_chat_template=True,
        fewshot_as_multiturn=multiturn,
    )
    seconds = monotonic() - started
    metric, kept = gate.metric.split(",")
    samples: list[Sample] = []
    for task in gate.tasks:
        rows = [row for row in results["samples"][task] if row["filter"] == kept]
        samples += [
            read_sample(gate.name, task, row, metric, model.answers[task, number], reference)
            for number, row in enumerate(rows)
        ]
    about = {
        "metric": gate.metric,
        "fewshot": next(iter(tasks.values())).get_config("num_fewshot"),
        "thinking": gate.thinking,
        "streamed": gate.streamed,
        "max_tokens": gate.max_tokens,
        "other_metrics": {task: metrics(results["results"][task]) for task in gate.tasks},
    }
    return GateRun(summarize(gate, tasks, samples, seconds), about, scores_by_task(gate, samples), samples)


def read_sample(
    gate: str,
    task: str,
    row: Mapping[str, Any],
    metric: str,
    answer: Answer,
    reference: Mapping[str, Outcomes] | None,
) -> Sample:
    """A sample from lm-eval's log of an item, with the whole reply."""
    value = row[metric]
    messages = json.loads(row["arguments"][0][0])
    identity = item_id(row["doc"], row["doc_id"])
    known = None if reference is None else reference.get(identity)
    return Sample(
        gate=gate,
        task=task,
        id=identity,
        earlier_messages=len(messages) - 1,
        prompt=messages[-1]["content"],
        target=str(row["target"]),
        reasoning=answer.reasoning,
        answer=answer.text,
        extracted=str(row["filtered_resps"][0]),
        outcomes=[float(one) for one in (value if isinstance(value, Sequence) else [value])],
        reference=None if known is None else list(known),
        finish_reason=answer.finish_reason,
        truncated_thinking=answer.truncated,
        prompt_tokens=answer.usage.prompt_tokens if answer.usage else None,
        completion_tokens=answer.usage.completion_tokens if answer.usage else None,
        seconds=answer.seconds,
        retries=answer.retries,
    )


def item_id(document: Mapping[str, Any], number: int) -> str:
    """An item's id in its benchmark, else its index in the dataset."""
    for name in ("question_id", "key", "id"):
        if name in document:
            return str(document[name])
    return str(number)


def summarize(gate: Gate, tasks: Tasks, samples: Sequence[Sample], seconds: float) -> GateScore:
    """A gate's score from its samples; ``seconds``: wall time."""
    asked = [[sample for sample in samples if sample.task == task] for task in gate.tasks]
    known = [[sample for sample in of_task if sample.reference is not None] for of_task in asked]
    recorded = [[sample.reference or [] for sample in of_task] for of_task in known]
    whole = sum(map(len, known)) == len(samples)
    paired = Paired.of((sample.outcomes, sample.reference or []) for of_task in known for sample in of_task)
    found = estimate([[sample.outcomes for sample in of_task] for of_task in asked])
    bounded = all(0.0 <= one <= 1.0 for sample in samples for one in sample.outcomes)
    return GateScore(
        gate=gate.name,
        items=len(samples),
        items_in_all=sum(len(task.eval_docs) for task in tasks.values()),
        score=found.score,
        low=found.low if bounded else None,
        high=found.high if bounded else None,
        threshold=gate.threshold,
        baseline=gate.baseline,
        reference_score=estimate(recorded).score if whole else None,
        lost=paired.lost if whole else None,
        gained=paired.gained if whole else None,
        cut=sum(sample.finish_reason == "length" for sample in samples),
        truncated_thinking=sum(sample.truncated_thinking for sample in samples),
        empty=sum(not sample.answer.strip() for sample in samples),
        retries=sum(sample.retries for sample in samples),
        seconds=seconds,
    )


def scores_by_task(gate: Gate, samples: Sequence[Sample]) -> dict[str, float]:
    """The score of each task; empty if there is only one."""
    if len(gate.tasks) == 1:
        return {}
    return {
        task: estimate([[sample.outcomes for sample in samples if sample.task == task]]).score
        for task in gate.tasks
    }


def metrics(aggregate: Mapping[str, Any]) -> dict[str, float]:
    """A task's aggregates that are numbers, by ``metric,filter``."""
    return {
        name: float(value)
        for name, value in aggregate.items()
        if "," in name and not name.split(",")[0].endswith("_stderr")
    }
