"""The whole measurement: load everything, ask gate by gate, print, save."""

import argparse
import asyncio
import logging
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.environment import header
from bench.errors import BenchError
from bench.gates import nano
from bench.gates.chat_model import PATH, ChatModel
from bench.gates.gate import NANO_NAMES, OFFICIAL, Gate
from bench.gates.report import draw, quality_table
from bench.gates.result import QualityResult, samples_path
from bench.gates.runner import GateRun, run_gate
from bench.gates.tasks import Tasks, hub_tasks, other_gates, sample
from bench.load.client import Client
from bench.options import picture_path


def measure(args: argparse.Namespace) -> int:
    """What ``bench.quality`` does with its options. Exit status 0 whatever the verdicts."""
    began = perf_counter()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    head = asyncio.run(probe(args))
    gates, reference = choose_gates(args.tasks, args.nano)
    # every dataset first: one that cannot be loaded should not end a run of hours
    loaded = [(gate, load(gate, args)) for gate in gates]
    result = QualityResult(
        **head,
        kind="quality",
        seconds=0.0,
        limit=args.limit,
        seed=args.seed,
        first=args.first,
        concurrency=args.concurrency,
        fewshot_as_multiturn=not args.single_turn,
        samples=None if args.out is None else samples_path(args.out).name,
        gates=[],
    )
    done: list[GateRun] = []
    for gate, tasks in loaded:
        recorded = None if reference is None else reference.outcomes.get(gate.name)
        done.append(ask(args, gate, tasks, head["model"], recorded))
        result = result.model_copy(
            update={"gates": [run.score for run in done], "seconds": perf_counter() - began}
        )
        save(result, done, args.out)  # what is done is safe from what comes
    print(quality_table(result))
    picture = picture_path(args)
    if picture is not None:
        draw(result, picture)
    for path in filter(None, (args.out, picture)):
        print(f"wrote {path}")
    return 0


async def probe(args: argparse.Namespace) -> dict[str, Any]:
    """One short chat, and the result file's head. Raises BenchError if nothing answers, or not rightly."""
    async with Client(args.url, timeout=args.timeout, api_key=args.api_key) as client:
        model = args.model or await client.model() or "default"
        question = [{"role": "user", "content": "Hello"}]
        await client.complete(
            PATH, {"model": model, "messages": question, "max_tokens": 1, "temperature": 0.0}
        )
        return await header(args, client, model)


def choose_gates(names: str, folder: Path) -> tuple[list[Gate], nano.Reference | None]:
    """The gates that ``--tasks`` names, in order, and the reference if one of them is nano's."""
    official = {gate.name: gate for gate in OFFICIAL}
    sets = {"official": tuple(official), "nano": NANO_NAMES}
    parts = [part.strip() for part in names.split(",") if part.strip()]
    wanted = [name for part in parts for name in sets.get(part, (part,))]
    if not wanted:
        raise BenchError("--tasks: want nano, official, or names")
    reference = nano.read_reference(folder) if set(wanted) & set(NANO_NAMES) else None
    known = official | (
        {} if reference is None else {gate.name: gate for gate in nano.nano_gates(folder, reference)}
    )
    gates = [gate for name in wanted for gate in ([known[name]] if name in known else other_gates(name))]
    return list({gate.name: gate for gate in gates}.values()), reference


def load(gate: Gate, args: argparse.Namespace) -> Tasks:
    """The gate's tasks with their data."""
    return (
        nano.nano_tasks(gate, args.nano)
        if gate.name in NANO_NAMES
        else hub_tasks(gate, dict(args.data or ()))
    )


def ask(
    args: argparse.Namespace,
    gate: Gate,
    tasks: Tasks,
    model: str,
    recorded: nano.Recorded | None,
) -> GateRun:
    """Put one gate through the server."""
    chat = ChatModel(
        args.url,
        model=model,
        thinking=gate.thinking,
        stream=gate.streamed,
        concurrency=args.concurrency,
        retries=args.retries,
        timeout=args.timeout,
        api_key=args.api_key,
        label=gate.name,
    )
    chosen = {
        name: sample(task, args.limit, seed=args.seed, first=args.first) for name, task in tasks.items()
    }
    return run_gate(gate, tasks, chat, chosen=chosen, multiturn=not args.single_turn, reference=recorded)


def save(result: QualityResult, done: list[GateRun], out: Path | None) -> None:
    """Write the result file and the replies, each under a temporary name first."""
    if out is None:
        return
    result.save(out)
    path = samples_path(out)
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as lines:
        lines.writelines(one.model_dump_json() + "\n" for run in done for one in run.samples)
    part.replace(path)
