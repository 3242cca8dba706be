"""One variant: each stage at a server of its own, what is finished on record, and the result file."""

import asyncio
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from bench import environment, latency
from bench.errors import BenchError
from bench.gates.result import QualityResult
from bench.latency_result import LatencyResult, summarize
from bench.launch import ServerProcess, free_port
from bench.variants.plan import NONE, Plan
from bench.variants.result import LatencyPart, VariantResult, Weights
from bench.variants.variant import Variant
from bench.variants.weights import import_paths

READY = "/ping"
STAGES = "stages.json"
GATES, LATENCY = "gates", "latency-"


def finished(plan: Plan, variant: Variant, fingerprint: str) -> VariantResult | None:
    """The variant's result of an earlier run, if it is there, did not fail, and measures the same."""
    path = plan.result(variant)
    if not path.is_file():
        return None
    try:
        result = VariantResult.load(path)
    except BenchError:
        return None  # another version's, or not ours: it is made anew
    if result.error is not None or result.fingerprint != fingerprint:
        return None
    # its name and prose may have changed
    return result.model_copy(update={"variant": told(plan, variant)})


def forget(plan: Plan, variant: Variant) -> None:
    """Nothing of the variant counts as measured any more."""
    plan.result(variant).unlink(missing_ok=True)
    (plan.raw(variant) / STAGES).unlink(missing_ok=True)


def stages(plan: Plan) -> list[str]:
    """What is measured of each variant, in order: the gates, then its share of the timed runs, in rounds."""
    rounds = [f"{LATENCY}{number}" for number in range(1, plan.effort.rounds + 1)]
    return rounds if plan.tasks == NONE else [GATES, *rounds]


def is_finished(plan: Plan, variant: Variant, weights: Weights, stage: str) -> bool:
    """Whether an earlier run has finished the stage."""
    return stage in StageRecord(plan.raw(variant), plan.fingerprint(variant, weights.sha256)).seconds


def measure(plan: Plan, variant: Variant, weights: Weights, stage: str) -> None:
    """One stage, at a server of its own.

    Raises BenchError when the server does not start or answer, or the measurement fails.
    """
    record = StageRecord(plan.raw(variant), plan.fingerprint(variant, weights.sha256))
    out = plan.raw(variant) / f"{stage}.json"
    with record.running(stage), serving(plan, variant, stage) as url:
        if stage == GATES:
            run_gates(plan, url, out)
        else:
            run_latency(plan, url, out, int(stage.removeprefix(LATENCY)))


def gather(plan: Plan, variant: Variant, weights: Weights) -> VariantResult:
    """The result file of a variant whose stages are all finished."""
    raw, fingerprint = plan.raw(variant), plan.fingerprint(variant, weights.sha256)
    record = StageRecord(raw, fingerprint)
    rounds = [LatencyResult.load(raw / f"{stage}.json") for stage in stages(plan) if stage != GATES]
    runs = [run for one in rounds for run in one.runs]
    last = rounds[-1]
    return save(
        plan,
        VariantResult(
            **head(plan, variant, weights, fingerprint, last.card),
            started=rounds[0].started,
            seconds=sum(record.seconds.values()),
            server=last.server,
            latency=LatencyPart(
                endpoint=last.endpoint,
                prompts=last.prompts,
                settings=plan.latency_settings(),
                summaries=summarize(runs, None),
            ),
            gates=QualityResult.load(raw / f"{GATES}.json").gates if plan.tasks != NONE else [],
            stage_seconds=record.seconds,
        ),
    )


def failure(plan: Plan, variant: Variant, weights: Weights | None, error: BenchError) -> VariantResult:
    """The result file of a variant that could not be measured."""
    fingerprint = plan.fingerprint(variant, weights.sha256) if weights is not None else ""
    return save(
        plan,
        VariantResult(
            **head(plan, variant, weights, fingerprint, plan.card),
            started=datetime.now(UTC).replace(microsecond=0),
            seconds=0.0,
            error=str(error),
        ),
    )


def head(
    plan: Plan, variant: Variant, weights: Weights | None, fingerprint: str, card: str | None
) -> dict[str, Any]:
    """The fields that do not come from a measurement."""
    return {
        "command": plan.command,
        "url": "",  # a server of its own, gone by now
        "model": None if weights is None else weights.file,
        "host": environment.host(),
        "card": card,
        "versions": environment.versions(),
        "notes": list(plan.notes),
        "variant": told(plan, variant),
        "source": plan.source,
        "fingerprint": fingerprint,
        "weights": weights,
        "quality_settings": plan.quality_settings(),
        "raw": str(plan.raw(variant).relative_to(plan.out)),
    }


def told(plan: Plan, variant: Variant) -> Variant:
    """The variant with all that its server is told."""
    return variant.model_copy(update={"server": plan.server_settings(variant)})


def save(plan: Plan, result: VariantResult) -> VariantResult:
    """Write the variant's result file."""
    result.save(plan.out / f"{result.variant.name}.json")
    return result


class StageRecord:
    """Which stages of a variant are finished; what bears another fingerprint counts for nothing.

    ``seconds``: wall time by finished stage, the server's start included.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self._file = folder / STAGES
        self._fingerprint = fingerprint
        self.seconds: dict[str, float] = {}
        try:
            known = json.loads(self._file.read_text(encoding="utf-8"))
            if known["fingerprint"] == fingerprint:
                self.seconds = dict(known["seconds"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # nothing is known to be finished

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """On record if the block ends well; what it prints goes to a file beside its result."""
        began = perf_counter()
        if not self.seconds:  # what lies there is another variant's, or a failure's
            shutil.rmtree(self._file.parent, ignore_errors=True)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        tables = self._file.with_name(f"{name}.txt")
        with tables.open("w", encoding="utf-8") as output, redirect_stdout(output):
            yield
        self.seconds[name] = perf_counter() - began
        part = self._file.with_name(self._file.name + ".part")
        part.write_text(json.dumps({"fingerprint": self._fingerprint, "seconds": self.seconds}) + "\n")
        part.replace(self._file)


@contextmanager
def serving(plan: Plan, variant: Variant, stage: str) -> Iterator[str]:
    """The URL of a server that runs the variant for the time of the block. Raises BenchError as it starts."""
    port = free_port()
    command = [sys.executable, "-m", "server", "--model", str(plan.gguf(variant)), "--alias", variant.name]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    for name, value in plan.server_settings(variant).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            command += [f"--{flag}", str(value)]
    server = ServerProcess(
        variant.name,
        command,
        f"http://127.0.0.1:{port}",
        ready_path=READY,
        log=plan.raw(variant) / f"{stage}.server.log",
        environment=import_paths(),
        timeout=plan.start_timeout,
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


def run_latency(plan: Plan, url: str, out: Path, number: int) -> None:
    """The latency protocols, round ``number`` from 1. Raises BenchError when a request failed."""
    status = asyncio.run(latency.latency(plan.latency_arguments(url, out, number)))
    if status != 0:
        errors = [run.error for run in LatencyResult.load(out).runs if run.error is not None]
        raise BenchError(f"latency: {len(errors)} requests failed; the first: {errors[0]}")


def run_gates(plan: Plan, url: str, out: Path) -> None:
    """The quality gates through lm-eval."""
    from bench.gates.measure import measure as measure_gates  # lm-eval takes seconds to import

    measure_gates(plan.quality_arguments(url, out))
