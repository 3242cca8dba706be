"""The engine's own ceiling: llama-batched-bench, llama.cpp with no server around it.

It reads ``sequences`` prompts and then decodes one token of each a step: no sampling, no detokenising, no
HTTP, no cache, no speculation.
"""

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pandas as pd

from bench.errors import BenchError
from bench.store import Run

PROGRAM = "llama-batched-bench"

SUBJECT, WORKLOAD = "llama.cpp alone", "ceiling"
"""Under which it stands in the store, in cells such as "512 in, 128 out, 8 sequences"."""

CELL = re.compile(r"(\d+) in, (\d+) out, (\d+) sequences")


@dataclass(frozen=True, slots=True)
class Batch:
    """``sequences`` prompts of ``prompt_tokens`` each, then ``output_tokens`` steps of all of them."""

    prompt_tokens: int
    output_tokens: int
    sequences: int
    prefill_seconds: float
    decode_seconds: float

    @property
    def seconds(self) -> float:
        """Both together: what one round of requests takes at least."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def output_rate(self) -> float:
        """Output tokens a second, prefill included."""
        return self.sequences * self.output_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Batches of several shapes."""

    batches: Sequence[Batch]

    @classmethod
    def of(cls, frame: pd.DataFrame) -> Self | None:
        """As it was recorded; None where a run has none."""
        rows = frame[frame["workload"] == WORKLOAD].pivot_table(
            index="cell", columns="metric", values="value"
        )
        if rows.empty:
            return None
        shapes = [match.groups() for cell in rows.index if (match := CELL.fullmatch(cell))]
        times = rows[["prefill_seconds", "decode_seconds"]].to_numpy().tolist()
        return cls([Batch(*map(int, shape), *each) for shape, each in zip(shapes, times, strict=True)])

    def record(self, run: Run) -> None:
        """Append it to a run, as round 1."""
        for batch in self.batches:
            cell = f"{batch.prompt_tokens} in, {batch.output_tokens} out, {batch.sequences} sequences"
            times = {"prefill_seconds": batch.prefill_seconds, "decode_seconds": batch.decode_seconds}
            run.add(SUBJECT, WORKLOAD, cell, 1, times)

    def batch(self, prompt_tokens: int, output_tokens: int, sequences: int) -> Batch | None:
        """That of this shape; None when it was not run."""
        shape = (prompt_tokens, output_tokens, sequences)
        found = (b for b in self.batches if (b.prompt_tokens, b.output_tokens, b.sequences) == shape)
        return next(found, None)

    def prefill_rate(self, tokens: int) -> float | None:
        """Tokens a second at which one prompt of this length is read; None when it was not run."""
        found = (b for b in self.batches if (b.prompt_tokens, b.sequences) == (tokens, 1))
        return next((tokens / batch.prefill_seconds for batch in found), None)


async def run_batches(
    binaries: Path,
    gguf: Path,
    *,
    prompts: Sequence[int],
    outputs: Sequence[int],
    sequences: Sequence[int],
    threads: int = 0,
    options: Sequence[str] = (),
    timeout: float = 600.0,
) -> list[Batch]:
    """Every combination of the three, all layers on the GPU where there is one.

    Raises BenchError when the program is missing, fails, takes more than ``timeout`` seconds, or answers
    something else than rows.
    """
    cells = max(sequences) * (max(prompts) + max(outputs))
    command = [str(binaries / PROGRAM), "-m", str(gguf), "-ngl", "99", "-c", str(cells)]
    command += ["-npp", _list(prompts), "-ntg", _list(outputs), "-npl", _list(sequences)]
    command += ["-t", str(threads), "-tb", str(threads)] if threads else []
    return read_batches(await _output([*command, *options, "--output-format", "jsonl"], binaries, timeout))


def read_batches(output: str) -> list[Batch]:
    """The rows of ``--output-format jsonl``. Raises BenchError when there is none."""
    try:
        rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        made = [Batch(row["pp"], row["tg"], row["pl"], row["t_pp"], row["t_tg"]) for row in rows]
    except (ValueError, LookupError, TypeError) as error:
        raise BenchError(f"{PROGRAM}: its output is not as expected: {error!r}") from error
    if not made:
        raise BenchError(f"{PROGRAM}: no results in its output")
    return made


async def _output(command: list[str], binaries: Path, timeout: float) -> str:
    libraries = os.pathsep.join(filter(None, [str(binaries), os.environ.get("LD_LIBRARY_PATH", "")]))
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "LD_LIBRARY_PATH": libraries},
        )
    except OSError as error:
        raise BenchError(f"--binaries: cannot run {command[0]}: {error.strerror}") from error
    try:
        out, err = await asyncio.wait_for(process.communicate(), timeout)
    except TimeoutError as error:
        raise BenchError(f"{command[0]}: not done within {timeout:g} s (--timeout)") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise BenchError(f"{' '.join(command)} failed:\n{err.decode(errors='replace')[-1500:]}")
    return out.decode(errors="replace")


def _list(values: Iterable[int]) -> str:
    return ",".join(map(str, sorted(set(values))))
