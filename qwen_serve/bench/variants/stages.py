"""Stages of a variant's measurement, each with a server of its own: the gates, then rounds of timing."""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from qwen_serve.bench import provenance
from qwen_serve.bench.arguments import PromptOptions
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.gates.options import GateServer
from qwen_serve.bench.load.cell import Cell, PromptSource
from qwen_serve.bench.load.client import Client
from qwen_serve.bench.load.generator import Target
from qwen_serve.bench.load.latency import latency_cells
from qwen_serve.bench.load.vocabulary import GgufVocabulary, Vocabulary
from qwen_serve.bench.servers.launch import PYTHON_PATH, ServerProcess, free_port
from qwen_serve.bench.store import Run
from qwen_serve.bench.terminal import Bar
from qwen_serve.bench.variants.plan import ENDPOINT, STREAM_ENDPOINT, Plan
from qwen_serve.server.variant import Variant

GATES = "gates"


def round_stage(number: int) -> str:
    """The name of a round's stage."""
    return f"round {number}"


class Stages:
    """The stages of one sweep. Prompts are the same in every round, and the same for variants with the same
    vocabulary."""

    def __init__(self, plan: Plan, run: Run) -> None:
        self._plan = plan
        self._run = run
        self._cells: dict[str, list[Cell]] = {}

    def gates(self, variant: Variant) -> None:
        """Run the quality gates. Raises BenchError if the server does not start, or if a request keeps
        failing."""
        from qwen_serve.bench.gates.measure import (  # lm-eval takes seconds to import
            ask_gates,
            load_gates,
            probe,
        )

        options = self._plan.gates
        assert options is not None
        samples = samples_of(self._run.folder, variant.name)
        samples.unlink(missing_ok=True)
        with serving(self._plan, variant, self._log(variant, GATES)) as url:
            server = GateServer(url=url, timeout=self._plan.timeout)
            model, _ = probe(server)
            loaded = load_gates(options)
            ask_gates(self._run, variant.name, loaded, options, server=server, model=model, samples=samples)

    def time(self, variant: Variant, number: int) -> None:
        """Measure round ``number`` of the latency protocols. Raises BenchError if the server does not start,
        or if a request fails."""
        with serving(self._plan, variant, self._log(variant, f"round-{number}")) as url:
            asyncio.run(self._time(variant, number, url))

    async def _time(self, variant: Variant, number: int, url: str) -> None:
        async with Client(url, timeout=self._plan.timeout) as client:
            target = Target(variant.name, client)
            if variant.name not in self._cells:
                self._cells[variant.name] = await self._prepare(variant, client)
                about = await provenance.about_server(client)
                del about["url"]  # the server's port is only temporary
                self._run.describe(variant.name, **about)
            cells = self._cells[variant.name]
            for cell in cells:
                await cell.warm_up(target)
            with Bar(f"{variant.name}, {round_stage(number)}", total=sum(c.requests for c in cells)) as bar:
                for cell in cells:
                    found = await cell.measure(target, number, bar)
                    for values in found.rows:
                        self._run.add(variant.name, cell.workload, cell.name, number, values)
                    if found.errors:
                        raise BenchError(
                            f"latency, {cell.workload}, {cell.name}: {len(found.errors)} requests failed; "
                            f"the first: {found.errors[0]}"
                        )

    async def _prepare(self, variant: Variant, client: Client) -> list[Cell]:
        plan, effort = self._plan, self._plan.effort
        source = PromptSource(vocabulary_of(plan.gguf(variant)), PromptOptions(seed=plan.seed))
        cells = latency_cells(
            plan.categories,
            plan.protocol,
            source,
            endpoints=(ENDPOINT, STREAM_ENDPOINT),
            warmup=effort.warmup,
            rounds=(effort.rounds, effort.rounds),
            counts=(effort.runs, effort.stream_runs),
        )
        for cell in cells:
            await cell.prepare()
        return cells

    def _log(self, variant: Variant, stage: str) -> Path:
        return self._run.folder / "logs" / f"{variant.name}-{stage}.log"


def samples_of(folder: Path, name: str) -> Path:
    """The file with a variant's replies in a run's folder."""
    return folder / f"{name}.samples.jsonl"


@cache
def vocabulary_of(gguf: Path) -> Vocabulary:
    """The GGUF's tokenizer, for token counts that do not depend on the server."""
    return GgufVocabulary(gguf)


@contextmanager
def serving(plan: Plan, variant: Variant, log: Path) -> Iterator[str]:
    """Run a server with the variant during the block. Yields its URL. Raises BenchError if it does not
    start."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "qwen_serve.server",
        "--model",
        str(plan.gguf(variant)),
        "--alias",
        variant.name,
    ]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    for name, value in plan.server_settings(variant).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            command += [f"--{flag}", str(value)]
    url, timeout = f"http://127.0.0.1:{port}", plan.start_timeout
    server = ServerProcess(
        variant.name, command, url, ready_path="/ping", log=log, environment=PYTHON_PATH, timeout=timeout
    )
    asyncio.run(server.start())
    try:
        yield server.url
    except BenchError as error:
        if server.running:
            raise
        raise BenchError(f"{error}; the server has ended, its log with:\n{server.tail()}") from error
    finally:
        asyncio.run(server.stop())
