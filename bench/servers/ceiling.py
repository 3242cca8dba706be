"""The engine's own ceiling: llama-batched-bench, llama.cpp with no server around it.

It reads ``sequences`` prompts and then decodes one token of each a step: no sampling, no detokenising, no
HTTP, no cache, no speculation.
"""

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from bench.errors import BenchError
from bench.load.protocol import CATEGORIES
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


Ceiling = Mapping[tuple[int, int, int], Batch]
"""By tokens in, tokens out and sequences; empty where nothing was measured."""


def record_ceiling(run: Run, batches: Sequence[Batch]) -> None:
    """Append them to a run, as round 1."""
    for batch in batches:
        cell = f"{batch.prompt_tokens} in, {batch.output_tokens} out, {batch.sequences} sequences"
        times = {"prefill_seconds": batch.prefill_seconds, "decode_seconds": batch.decode_seconds}
        run.add(SUBJECT, WORKLOAD, cell, 1, times)


def read_ceiling(frame: pd.DataFrame) -> Ceiling:
    """As it was recorded."""
    rows = frame[frame["workload"] == WORKLOAD]
    found: dict[tuple[int, int, int], Batch] = {}
    for cell, times in rows.pivot_table(index="cell", columns="metric", values="value").iterrows():
        if match := CELL.fullmatch(str(cell)):
            tokens_in, tokens_out, sequences = map(int, match.groups())
            both = float(times["prefill_seconds"]), float(times["decode_seconds"])
            found[tokens_in, tokens_out, sequences] = Batch(tokens_in, tokens_out, sequences, *both)
    return found


def request_ms(ceiling: Ceiling, category: str) -> float | None:
    """How long llama.cpp alone takes for a category's request; None where that was not measured."""
    one = CATEGORIES[category]
    found = ceiling.get((one.prompt_tokens, one.max_tokens, 1))
    return 1000 * found.seconds if found is not None else None


def output_rate(ceiling: Ceiling, workload: str, level: int, settings: Mapping[str, Any]) -> float | None:
    """Output tok/s of llama.cpp alone at a level of concurrency; None for conversations.

    With shared prefixes: each prefix read once, then rounds of full batches of questions, decoded as if they
    had no prefix before them, so it can not quite be reached.
    """
    if not ceiling or workload == "chat":
        return None
    question, answer = int(settings["input_tokens"]), int(settings["output_tokens"])
    batch = ceiling.get((question, answer, level))
    if batch is None or workload != "shared-prefix":
        return batch.output_rate if batch is not None else None
    length = int(settings["prefix_tokens"])
    prefix = [one for (tokens, _, sequences), one in ceiling.items() if (tokens, sequences) == (length, 1)]
    if not prefix:
        return None
    waves = int(settings["waves"])
    requests = max(4, waves * level) if waves else int(settings["requests"])
    prefixes = min(int(settings["prefixes"]), requests) * prefix[0].prefill_seconds
    return requests * answer / (prefixes + requests / level * batch.seconds)


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
