"""The engine's own ceiling: what llama.cpp does with no server around it, from its two benchmark programs.

llama-batched-bench reads ``sequences`` prompts and then decodes one token of each a step: no sampling, no
detokenising, no HTTP, no cache, no speculation. llama-bench gives the single rates with their spread.
"""

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pandas as pd

from bench.errors import BenchError
from bench.store import Run

PROGRAMS = ("llama-batched-bench", "llama-bench")

SUBJECT, WORKLOAD = "llama.cpp alone", "ceiling"
"""Under which both stand in the store: batches in cells such as "512 in, 128 out, 8 sequences", llama-bench's
tests under their own names."""

SHAPE = re.compile(r"(\d+) in, (\d+) out, (\d+) sequences")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchedRow:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRow:
    """One test of llama-bench: ``pp512`` (prefill) or ``tg128`` (decode of one sequence), tokens a second."""

    test: str
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """What both programs measured."""

    batched: list[BatchedRow]
    raw: list[RawRow]
    build: str = ""

    @classmethod
    def of(cls, frame: pd.DataFrame) -> Self | None:
        """As it was recorded; None where a run has none."""
        rows = frame[frame["workload"] == WORKLOAD]
        batched: list[BatchedRow] = []
        raw: list[RawRow] = []
        for cell, group in rows.groupby("cell", sort=False):
            value = dict(zip(group["metric"], group["value"], strict=True))
            if shape := SHAPE.fullmatch(str(cell)):
                prompt, output, sequences = map(int, shape.groups())
                batched.append(
                    BatchedRow(
                        prompt_tokens=prompt,
                        output_tokens=output,
                        sequences=sequences,
                        prefill_seconds=value["prefill_seconds"],
                        decode_seconds=value["decode_seconds"],
                    )
                )
            else:
                raw.append(RawRow(test=str(cell), rate=value["engine_rate"]))
        return cls(batched=batched, raw=raw) if len(rows) else None

    def record(self, run: Run) -> None:
        """Append it to a run, as round 1."""
        run.describe(SUBJECT, build=self.build)
        for row in self.batched:
            cell = f"{row.prompt_tokens} in, {row.output_tokens} out, {row.sequences} sequences"
            values = {"prefill_seconds": row.prefill_seconds, "decode_seconds": row.decode_seconds}
            run.add(SUBJECT, WORKLOAD, cell, 1, values)
        for test in self.raw:
            run.add(SUBJECT, WORKLOAD, test.test, 1, {"engine_rate": test.rate})

    def batch(self, prompt_tokens: int, output_tokens: int, sequences: int) -> BatchedRow | None:
        """The row of this shape; None when it was not run."""
        shape = (prompt_tokens, output_tokens, sequences)
        found = (r for r in self.batched if (r.prompt_tokens, r.output_tokens, r.sequences) == shape)
        return next(found, None)

    def prefill_rate(self, tokens: int) -> float | None:
        """Tokens a second that llama-bench reads a prompt of this length with; None when it was not run."""
        return next((row.rate for row in self.raw if row.test == f"pp{tokens}"), None)


def parse_batched(output: str) -> list[BatchedRow]:
    """The rows of ``llama-batched-bench --output-format jsonl``. Raises BenchError when there is none."""
    lines = [line for line in output.splitlines() if line.startswith("{")]
    try:
        rows = [json.loads(line) for line in lines]
        made = [
            BatchedRow(
                prompt_tokens=row["pp"],
                output_tokens=row["tg"],
                sequences=row["pl"],
                prefill_seconds=row["t_pp"],
                decode_seconds=row["t_tg"],
            )
            for row in rows
        ]
    except (ValueError, LookupError, TypeError) as error:
        raise BenchError(f"llama-batched-bench: its output is not as expected: {error!r}") from error
    if not made:
        raise BenchError("llama-batched-bench: no results in its output")
    return made


def parse_raw(output: str) -> tuple[str, list[RawRow]]:
    """(build, rows) of ``llama-bench -o json``. Raises BenchError when it is something else."""
    try:
        tests: list[dict[str, Any]] = json.loads(output)
        rows = [
            RawRow(
                test=f"pp{test['n_prompt']}" if test["n_prompt"] else f"tg{test['n_gen']}",
                rate=test["avg_ts"],
            )
            for test in tests
        ]
        first = tests[0]
        build = f"{first['build_commit']} ({first['backends']}; {first['gpu_info'] or first['cpu_info']})"
    except (ValueError, LookupError, TypeError) as error:
        raise BenchError(f"llama-bench: its output is not as expected: {error!r}") from error
    return build, rows


async def measure_ceiling(
    binaries: Path,
    gguf: Path,
    *,
    prompts: Sequence[int],
    outputs: Sequence[int],
    sequences: Sequence[int],
    threads: int,
    raw_prompts: Sequence[int] = (),
    timeout: float = 600.0,
) -> Ceiling:
    """Run both programs: every combination of the three batched, each length of a prompt alone.

    Raises BenchError when one is missing, fails, or takes more than ``timeout`` seconds.
    """
    cells = max(sequences) * (max(prompts) + max(outputs))
    thread_flags = ["-t", str(threads)] if threads else []
    batched = [str(binaries / "llama-batched-bench"), "-m", str(gguf), "-ngl", "99", "-c", str(cells)]
    batched += ["-npp", _list(prompts), "-ntg", _list(outputs), "-npl", _list(sequences)]
    batched += ["--output-format", "jsonl", *thread_flags]
    lengths = sorted({*prompts, *raw_prompts})
    raw = [str(binaries / "llama-bench"), "-m", str(gguf), "-ngl", "99", "-p", _list(lengths)]
    raw += ["-n", _list(outputs), "-r", "3", "-o", "json", *thread_flags]
    rows = parse_batched(await _output(batched, binaries, timeout))
    build, tests = parse_raw(await _output(raw, binaries, timeout))
    return Ceiling(batched=rows, raw=tests, build=build)


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
        raise BenchError(f"cannot run {command[0]}: {error.strerror}") from error
    try:
        out, err = await asyncio.wait_for(process.communicate(), timeout)
    except TimeoutError as error:
        raise BenchError(f"{command[0]}: not done within {timeout:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise BenchError(f"{command[0]} failed:\n{err.decode(errors='replace')[-1500:]}")
    return out.decode(errors="replace")


def _list(values: Iterable[int]) -> str:
    return ",".join(map(str, sorted(set(values))))
