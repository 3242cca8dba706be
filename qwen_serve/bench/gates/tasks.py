"""lm-eval's tasks for a gate: lm-eval's definitions with a gate's data, limits and sample.

Loading is reproducible. GPQA's definition shuffles choices, but their order is the same on every machine, so
runs can be compared item by item.
"""

import contextlib
import io
import json
import random
from collections.abc import Iterator, Mapping
from functools import cache, partial
from importlib.metadata import version
from math import ceil
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import langdetect  # type: ignore[import-untyped]
import nltk  # type: ignore[import-untyped]
from lm_eval import tasks as lm_eval_tasks
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
from lm_eval.utils import load_yaml_config

from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.gates.gate import Gate

FEWSHOT_SEED = 1234  # lm-eval's default
SHUFFLE_SEED = 0  # lm-eval's default for `random`
GATE_FOLDERS = ("mmlu_pro", "ifeval", "gpqa", "gsm8k")
# these instructions use nltk's sentence and word tokenizer, which needs data files
NEED_PUNKT = {"length_constraints:number_sentences", "change_case:capital_word_frequency"}
LM_EVAL = f"lm-eval {version('lm_eval')}"

Tasks = dict[str, ConfigurableTask]
Config = dict[str, Any]

# IFEval's language detection draws random numbers
langdetect.DetectorFactory.seed = 0
# IFEval's scorer downloads data when it is imported; `check_punkt` reports what is missing afterwards
nltk.download = partial(nltk.download, quiet=True, print_error_to=io.StringIO())


def hub_tasks(gate: Gate, data: Mapping[str, Path]) -> Tasks:
    """The tasks of a gate whose datasets are on the hub, by task name.

    ``data``: local folder of a gate or a task, used instead of the hub. A folder has a dataset in Hugging
    Face's layout, such as test.jsonl and validation.jsonl, or the hub's .parquet files. Raises BenchError if
    a dataset cannot be loaded.
    """
    tasks: Tasks = {}
    for name in gate.tasks:
        config = definition(name)
        folder = data.get(name, data.get(gate.name))
        if folder is not None:
            if not folder.is_dir():
                raise BenchError(f"--data {gate.name}={folder}: no such folder")
            config |= {"dataset_path": str(folder), "dataset_name": None}
        tasks[name] = make_task(name, config, gate)
    return tasks


def other_gates(name: str) -> list[Gate]:
    """A task, group or tag of lm-eval as gates without a threshold, one for each task. Raises BenchError for
    an unknown name.
    """
    entry = index_entry(name)
    if entry["type"] == "task":
        return [Gate(name, (name,), main_metric(name), thinking=None, max_tokens=None)]
    members = entry["task"]
    if members == -1:  # a group, whose members are in its file
        members = load_yaml_config(entry["yaml_path"], mode="full")["task"]
    names = [member if isinstance(member, str) else member["task"] for member in members]
    return [gate for member in names for gate in other_gates(member)]


def main_metric(name: str) -> str:
    """A task's first metric with its first filter. Raises BenchError for a task that does not generate
    text."""
    config = definition(name)
    kind = config.get("output_type", "generate_until")
    if kind != "generate_until":
        raise BenchError(
            f"--tasks {name}: wants {kind}, which a chat endpoint cannot give; choose one that generates"
        )
    filters = config.get("filter_list")
    metrics = config.get("metric_list") or [{"metric": "exact_match"}]
    return f"{metrics[0]['metric']},{filters[0]['name'] if filters else 'none'}"


def definition(name: str) -> Config:
    """A copy of lm-eval's definition of a task."""
    with contextlib.redirect_stdout(io.StringIO()):  # IFEval's scorer prints its download
        return dict(load_yaml_config(index_entry(name)["yaml_path"], mode="full"))


def index_entry(name: str) -> dict[str, Any]:
    """lm-eval's index entry of a name. Raises BenchError for an unknown name."""
    for everything in (False, True):
        index = task_index(everything=everything).task_index
        if name in index:
            return dict(index[name])
    close = ", ".join(sorted(known for known in index if name.lower() in known.lower())[:8])
    raise BenchError(
        f"--tasks {name}: unknown; want nano, official, one of their gates, or a task of {LM_EVAL}"
        + (f" (such as {close})" if close else "")
    )


@cache
def task_index(*, everything: bool) -> TaskManager:
    """lm-eval's index, of all tasks (``everything``, 15 s to read) or only of the gates' tasks."""
    if everything:
        return TaskManager()
    root = Path(lm_eval_tasks.__file__).parent
    return TaskManager(include_defaults=False, include_path=[str(root / name) for name in GATE_FOLDERS])


def make_task(name: str, config: Config, gate: Gate) -> ConfigurableTask:
    """A task whose documents are processed once. Raises BenchError if the dataset cannot be loaded."""
    if gate.max_tokens is not None:
        config["generation_kwargs"] = {**config["generation_kwargs"], "max_gen_toks": gate.max_tokens}
    try:
        with quiet_datasets():
            task = ConfigurableTask(config={**config, "task": name})
            fix_documents(task)
    except Exception as error:
        # `datasets` raises many types, for a missing network, a gated dataset, a broken file
        reason = " ".join(str(error).split()) or type(error).__name__
        raise BenchError(
            f"{name}: the dataset {config.get('dataset_path')} cannot be loaded: {reason}"
        ) from error
    try:
        # otherwise a missing column would raise only after all requests, when answers are scored
        task.process_results(task.eval_docs[0], [""])
    except Exception as error:
        raise BenchError(f"{name}: the dataset's first row cannot be scored: {error!r}") from error
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=FEWSHOT_SEED)
    check_punkt(task)
    return task


def fix_documents(task: ConfigurableTask) -> None:
    """Process the documents once. lm-eval processes them at each access, which shuffles GPQA's choices
    again."""
    process = task.config.process_docs
    if process is None:
        return
    split = task.config.test_split or task.config.validation_split
    random.seed(SHUFFLE_SEED)
    task.dataset = {**task.dataset, split: process(task.dataset[split])}
    task.set_config(key="process_docs", value=None)


@contextlib.contextmanager
def quiet_datasets() -> Iterator[None]:
    """Disable `datasets`' progress bars, and its cache, which may hold another shuffle."""
    datasets.disable_progress_bars()
    datasets.disable_caching()
    try:
        yield
    finally:
        datasets.enable_caching()
        datasets.enable_progress_bars()


def check_punkt(task: ConfigurableTask) -> None:
    """Raises BenchError if scoring needs nltk's data and they are missing. This is checked before any
    request."""
    if "instruction_id_list" not in task.features:
        return
    wanted = {name for names in task.eval_docs["instruction_id_list"] for name in names} & NEED_PUNKT
    if not wanted:
        return
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError as error:
        raise BenchError(
            f"{task.task_name}: scoring {', '.join(sorted(wanted))} takes nltk's punkt_tab: "
            "python -m nltk.downloader punkt_tab"
        ) from error


def messages(task: ConfigurableTask, number: int) -> list[dict[str, str]]:
    """The messages of a document's request, with a message for each few-shot example."""

    def as_json(chat: list[dict[str, str]], add_generation_prompt: bool) -> str:
        return json.dumps(chat)

    asked = task.fewshot_context(
        task.eval_docs[number],
        task.get_config("num_fewshot"),
        apply_chat_template=True,
        fewshot_as_multiturn=True,
        chat_template=as_json,
    )
    return list(json.loads(asked))


def sample(task: ConfigurableTask, limit: float | None, *, seed: int, first: bool) -> list[int]:
    """The numbers of the documents to send, ascending. ``limit``: None for all, a share below 1, or a number.

    They are drawn at random; with the same ``seed`` a smaller sample is part of a larger one. ``first``: take
    the first ones, as lm-eval's --limit does. Datasets are often sorted, so these are not representative.
    """
    order = list(range(len(task.eval_docs)))
    if limit is None:
        return order
    if not first:
        random.Random(f"{seed} {task.task_name}").shuffle(order)
    return sorted(order[: ceil(len(order) * limit) if limit < 1 else int(limit)])
