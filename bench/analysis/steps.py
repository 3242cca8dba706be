"""What a decode step and a prefill cost in the engine alone: milliseconds and bytes, file beside file."""

from pathlib import Path
from typing import Any

from bench.analysis.calibration import sequences_cell
from bench.analysis.geometry import Geometry
from bench.analysis.statistics import DEFAULT_ROUNDS
from bench.arguments import Natural, Positive, Positives, StoreOptions
from bench.errors import BenchError
from bench.report.tables import subjects_table
from bench.servers.ceiling import Batch, run_batches
from bench.store import Run
from bench.terminal import Bar

MEASURED = ("step_time", "step_bytes", "prefill_time")


async def steps(
    *gguf: Path,
    binaries: Path,
    sequences: Positives = (1, 8, 64),
    prompt_tokens: Positives = (16,),
    output_tokens: Positive = 64,
    rounds: Positive = DEFAULT_ROUNDS,
    threads: Natural = 0,
    gpu_layers: Natural = 99,
    batch: tuple[Positive, Positive] = (2048, 512),
    timeout: float = 600.0,
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
    options = ["-ngl", str(gpu_layers), "-b", str(batch[0]), "-ub", str(batch[1])]
    settings = {
        "rounds": rounds,
        "sequences": sequences,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "threads": threads,
        "options": options,
    }
    with store.begin("steps", settings) as run:
        for path, geometry in geometries.items():
            run.describe(path.name, **about(path, geometry))
        try:
            with Bar("steps", total=rounds * len(gguf), unit="runs") as bar:
                for round in range(1, rounds + 1):
                    first = round % len(gguf)
                    for path in (*gguf[first:], *gguf[:first]):
                        found = await run_batches(
                            binaries,
                            path,
                            prompts=prompt_tokens,
                            outputs=[output_tokens],
                            sequences=sequences,
                            threads=threads,
                            options=options,
                            timeout=timeout,
                        )
                        for one in found:
                            _add(run, path, geometries[path], round, one)
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


def _add(run: Run, path: Path, geometry: Geometry, round: int, batch: Batch) -> None:
    # of all steps of a run, the one in their middle: the cache grows by one token a step
    context = batch.prompt_tokens + batch.output_tokens // 2
    values = {
        "step_time": 1000 * batch.decode_seconds / batch.output_tokens,
        "step_bytes": geometry.decode(context, sequences=batch.sequences).n_bytes / 1e9,
    }
    run.add(path.name, "decode", sequences_cell(batch.sequences, context), round, values)
    reading = {"prefill_time": 1000 * batch.prefill_seconds}
    run.add(path.name, "prefill", sequences_cell(batch.sequences, batch.prompt_tokens), round, reading)
