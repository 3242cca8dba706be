"""Runs gates against one server: loads all data, then runs one gate after the other and records each."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qwen_serve.bench import provenance
from qwen_serve.bench.arguments import ServerOptions
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.gates import nano
from qwen_serve.bench.gates.chat_model import PATH, ChatModel
from qwen_serve.bench.gates.gate import NANO_NAMES, NANO_PICTURES, OFFICIAL, Gate
from qwen_serve.bench.gates.options import GateOptions
from qwen_serve.bench.gates.runner import run_gate
from qwen_serve.bench.gates.samples import append_samples
from qwen_serve.bench.gates.score import SUBTASKS, WORKLOAD
from qwen_serve.bench.gates.tasks import Tasks, hub_tasks, other_gates, sample
from qwen_serve.bench.load.client import Client
from qwen_serve.bench.store import Run

NANOS = (*NANO_NAMES, NANO_PICTURES)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A gate with its data. ``recorded``: outcomes of the full-precision model by item id; None if
    unknown."""

    gate: Gate
    tasks: Tasks
    recorded: nano.Recorded | None


def probe(server: ServerOptions) -> tuple[str, dict[str, str]]:
    """Send a short chat. Returns the model's name for requests, and the server's description of itself.

    Raises BenchError if the server does not answer, or answers with an error.
    """

    async def ask() -> tuple[str, dict[str, str]]:
        async with Client(server.url, timeout=server.timeout, api_key=server.api_key) as client:
            model = server.model or await client.model() or "default"
            question = [{"role": "user", "content": "Hello"}]
            body = {"model": model, "messages": question, "max_tokens": 1, "temperature": 0.0}
            await client.complete(PATH, body)
            return model, await provenance.about_server(client)

    return asyncio.run(ask())


def load_gates(options: GateOptions) -> list[Loaded]:
    """Load the datasets of all gates, so that a missing one is found before the first request. Raises
    BenchError."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    gates, reference = choose_gates(options.tasks, options.nano)
    return [
        Loaded(
            gate,
            nano.nano_tasks(gate, options.nano)
            if gate.name in NANOS
            else hub_tasks(gate, dict(options.data)),
            None if reference is None else reference.outcomes.get(gate.name),
        )
        for gate in gates
    ]


def choose_gates(names: str, folder: Path) -> tuple[list[Gate], nano.Reference | None]:
    """The gates that ``--tasks`` names, in order, and nano's reference if one of its gates is among them."""
    official = {gate.name: gate for gate in OFFICIAL}
    sets = {"official": tuple(official), "nano": NANO_NAMES}
    parts = [part.strip() for part in names.split(",") if part.strip()]
    wanted = [name for part in parts for name in sets.get(part, (part,))]
    if not wanted:
        raise BenchError("--tasks: want nano, official, or names")
    reference = nano.read_reference(folder) if set(wanted) & set(NANOS) else None
    known = official | (
        {} if reference is None else {gate.name: gate for gate in nano.nano_gates(folder, reference)}
    )
    gates = [gate for name in wanted for gate in ([known[name]] if name in known else other_gates(name))]
    return list({gate.name: gate for gate in gates}.values()), reference


def ask_gates(
    run: Run,
    subject: str,
    loaded: Sequence[Loaded],
    options: GateOptions,
    *,
    server: ServerOptions,
    model: str,
    samples: Path,
) -> None:
    """Run the gates against the server. A gate's rows and replies are kept if a later gate fails.

    Raises BenchError if a request keeps failing.
    """
    about: dict[str, object] = {}
    for one in loaded:
        gate = one.gate
        chat = ChatModel(
            server.url,
            model=model,
            thinking=gate.thinking,
            stream=gate.streamed,
            concurrency=options.concurrency,
            retries=options.retries,
            timeout=server.timeout,
            api_key=server.api_key,
            label=gate.name,
        )
        chosen = {
            name: sample(task, options.limit, seed=options.seed, first=options.first)
            for name, task in one.tasks.items()
        }
        done = run_gate(
            gate,
            one.tasks,
            chat,
            chosen=chosen,
            multiturn=not options.single_turn,
            reference=one.recorded,
        )
        append_samples(samples, done.samples)
        run.add(subject, WORKLOAD, gate.name, 1, done.score.values())
        for task, score in done.subtasks.items():
            run.add(subject, SUBTASKS, task, 1, {"score": 100 * score})
        about[gate.name] = done.about
        run.describe(subject, gates=about)
