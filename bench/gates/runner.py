"""One gate through one server: ask, score, count."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

from lm_eval.api import task as lm_eval_task
from lm_eval.evaluator import evaluate
from tqdm import tqdm

from bench.gates.chat_model import Answer, ChatModel
from bench.gates.estimate import Outcomes, estimate
from bench.gates.gate import Gate, verdict
from bench.gates.result import GateScore, Sample
from bench.gates.tasks import Tasks

# lm-eval's own bar, over the writing of a task's prompts: for a terminal only, and gone when it is done
lm_eval_task.tqdm = partial(tqdm, desc="prompts", leave=False, disable=None)


@dataclass(frozen=True, slots=True)
class GateRun:
    """What `run_gate` brings back."""

    score: GateScore
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
    """Ask the ``chosen`` documents of each task and score them with lm-eval's filters and metrics.

    ``multiturn``: few-shot examples as messages of their own, lm-eval's default. ``reference``: recorded
    outcomes by item id. Raises BenchError when an answer cannot be had.
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
    return GateRun(summarize(gate, tasks, samples, results["results"], seconds), samples)


def read_sample(
    gate: str,
    task: str,
    row: Mapping[str, Any],
    metric: str,
    answer: Answer,
    reference: Mapping[str, Outcomes] | None,
) -> Sample:
    """lm-eval's log of an item, with the whole reply."""
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
    """An item's id under the name that its benchmark gives it, else its place in the dataset."""
    for name in ("question_id", "key", "id"):
        if name in document:
            return str(document[name])
    return str(number)


def summarize(
    gate: Gate,
    tasks: Tasks,
    samples: Sequence[Sample],
    aggregates: Mapping[str, Mapping[str, Any]],
    seconds: float,
) -> GateScore:
    """The gate's figures out of its samples."""
    asked = [[sample for sample in samples if sample.task == task] for task in gate.tasks]
    outcomes = [[sample.outcomes for sample in of_task] for of_task in asked]
    recorded = [[sample.reference for sample in of_task if sample.reference] for of_task in asked]
    found = estimate(outcomes)
    total = sum(len(task.eval_docs) for task in tasks.values())
    bounded = all(0.0 <= one <= 1.0 for sample in samples for one in sample.outcomes)
    return GateScore(
        gate=gate.name,
        metric=gate.metric,
        fewshot=next(iter(tasks.values())).get_config("num_fewshot"),
        thinking=gate.thinking,
        streamed=gate.streamed,
        max_tokens=gate.max_tokens,
        items=len(samples),
        items_in_all=total,
        score=found.score,
        low=found.low if bounded else None,
        high=found.high if bounded else None,
        threshold=gate.threshold,
        baseline=gate.baseline,
        verdict=None
        if gate.threshold is None
        else verdict(found.score, found.low, found.high, gate.threshold, complete=len(samples) == total),
        reference_score=estimate(recorded).score if sum(map(len, recorded)) == len(samples) else None,
        cut=sum(sample.finish_reason == "length" for sample in samples),
        truncated_thinking=sum(sample.truncated_thinking for sample in samples),
        empty=sum(not sample.answer.strip() for sample in samples),
        retries=sum(sample.retries for sample in samples),
        prompt_tokens=sum_known([sample.prompt_tokens for sample in samples]),
        completion_tokens=sum_known([sample.completion_tokens for sample in samples]),
        seconds=seconds,
        subtasks={task: estimate([items]).score for task, items in zip(gate.tasks, outcomes, strict=True)}
        if len(gate.tasks) > 1
        else {},
        other_metrics={task: metrics(aggregates[task]) for task in gate.tasks},
    )


def metrics(aggregate: Mapping[str, Any]) -> dict[str, float]:
    """A task's aggregates, by ``metric,filter``."""
    return {
        name: float(value)
        for name, value in aggregate.items()
        if "," in name and not name.split(",")[0].endswith("_stderr")
    }


def sum_known(counts: Sequence[int | None]) -> int | None:
    """The sum, None when the server left one out."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
