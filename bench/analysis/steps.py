"""What a decode step and a prefill cost in the engine alone: milliseconds and bytes, file beside file."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from bench.analysis.calibration import sequences_cell
from bench.analysis.geometry import Geometry
from bench.analysis.statistics import DEFAULT_ROUNDS
from bench.arguments import Natural, Positive, Positives, StoreOptions
from bench.errors import BenchError
from bench.report.tables import subjects_table
from bench.store import Run
from bench.terminal import Bar

PROGRAM = "llama-batched-bench"
MEASURED = ("step_time", "step_bytes", "prefill_time")


def steps(
    *gguf: Path,
    binaries: Path,
    sequences: Positives = (1, 8, 64),
    prompt_tokens: Positives = (16,),
    output_tokens: Positive = 64,
    rounds: Positive = DEFAULT_ROUNDS,
    threads: Natural = 0,
    gpu_layers: Natural = 99,
    batch: tuple[Positive, Positive] = (2048, 512),
    timeout: Annotated[float, Parameter()] = 600.0,
    store: StoreOptions = StoreOptions(),
) -> int:
    """What a decode step costs in the engine alone: milliseconds and bytes moved, file beside file.

    llama.cpp's llama-batched-bench reads prompts, then decodes one token of each sequence a step, and does
    nothing else. The files take turns, --rounds times. Bytes are those of the weights, of the KV cache and of
    the recurrent states, which are read and written for every sequence.

    Parameters
    ----------
    gguf
        The first is what others compare with.
    binaries
        Folder that holds llama-batched-bench.
    sequences
        Decoded at once.
    prompt_tokens
        Of each sequence's prompt.
    output_tokens
        Steps a run.
    rounds
        Turns of every file.
    threads
        CPU threads (0: the program's own choice).
    gpu_layers
        Layers on the GPU.
    batch
        --batch-size and --ubatch-size.
    timeout
        Seconds a run may take.
    """
    if not gguf:
        raise BenchError("want at least one GGUF")
    if len({path.name for path in gguf}) < len(gguf):
        raise BenchError("two files have one name: the table could not tell them apart")
    geometries = {path: Geometry.load(path) for path in gguf}
    cells = max(sequences) * (max(prompt_tokens) + output_tokens)
    options = ["-ngl", str(gpu_layers), "-c", str(cells), "-b", str(batch[0]), "-ub", str(batch[1])]
    options += ["-npp", _list(prompt_tokens), "-ntg", str(output_tokens), "-npl", _list(sequences)]
    options += ["-t", str(threads), "-tb", str(threads)] if threads else []
    settings = {"rounds": rounds, "program": [PROGRAM, *options], "output_tokens": output_tokens}
    with Run.begin(store.out, "steps", settings=settings, card=store.card, notes=store.note) as run:
        for path, geometry in geometries.items():
            run.describe(path.name, **about(path, geometry))
        try:
            with Bar("steps", total=rounds * len(gguf), unit="runs") as bar:
                for round in range(1, rounds + 1):
                    first = round % len(gguf)
                    for path in (*gguf[first:], *gguf[:first]):
                        command = [str(binaries / PROGRAM), "-m", str(path), *options]
                        for row in run_program(command, binaries, timeout):
                            _add(run, path, geometries[path], round, row)
                        bar.advance(note=path.name)
        finally:
            subjects_table(run.results(), MEASURED, reference=gguf[0].name).print()
    return 0


def about(path: Path, geometry: Geometry) -> dict[str, Any]:
    """What a file holds: bytes, its output head, and what is read for a draft of the MTP block."""
    head = geometry.head
    drafted = geometry.draft_step(0).n_bytes if geometry.draft is not None else None
    return {
        "bytes": path.stat().st_size,
        "tokens": head.shape[1],
        "head": head.type.name,
        "head_bytes": head.n_bytes,
        "state_bytes": geometry.state_bytes,
        "draft_bytes": drafted,
    }


def run_program(command: Sequence[str], binaries: Path, timeout: float) -> list[dict[str, Any]]:
    """One run's rows. Raises BenchError: the program is missing, fails, or takes longer than ``timeout``."""
    libraries = os.pathsep.join(filter(None, [str(binaries), os.environ.get("LD_LIBRARY_PATH")]))
    environment = {**os.environ, "LD_LIBRARY_PATH": libraries}
    try:
        done = subprocess.run(
            [*command, "--output-format", "jsonl"],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env=environment,
        )
    except OSError as error:
        raise BenchError(f"--binaries: cannot run {command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"{command[0]}: not done within {timeout:g} s (--timeout)") from error
    if done.returncode != 0:
        raise BenchError(f"{' '.join(command)} failed:\n{done.stderr[-1500:]}")
    try:
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    except ValueError as error:
        raise BenchError(f"{command[0]}: its output is not as expected: {error}") from error
    if not rows:
        raise BenchError(f"{command[0]}: no results in its output")
    return rows


def _add(run: Run, path: Path, geometry: Geometry, round: int, row: Mapping[str, Any]) -> None:
    try:
        prompt, output, sequences = int(row["pp"]), int(row["tg"]), int(row["pl"])
        read, decoded = float(row["t_pp"]), float(row["t_tg"])
    except (KeyError, TypeError, ValueError) as error:
        raise BenchError(f"{PROGRAM}: its output is not as expected: {error!r}") from error
    # of all steps of a run, the one in their middle: the cache grows by one token a step
    context = prompt + output // 2
    values = {
        "step_time": 1000 * decoded / output,
        "step_bytes": geometry.decode(context, sequences=sequences).n_bytes / 1e9,
    }
    run.add(path.name, "decode", sequences_cell(sequences, context), round, values)
    reading = {"prefill_time": 1000 * read}
    run.add(path.name, "prefill", sequences_cell(sequences, prompt), round, reading)


def _list(values: Sequence[int]) -> str:
    return ",".join(map(str, sorted(set(values))))
