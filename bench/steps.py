"""What does a decode step cost? Milliseconds and bytes read, for several GGUFs side by side.

    python bench/steps.py Q4_K_M.gguf Q4_K_M-head4.gguf v131072-Q4_K_M.gguf --binaries DIR --out results.json

Steps are timed by llama.cpp's llama-batched-bench, which decodes one token of each sequence a step and does
nothing else; `python bench/llama_cpp_build.py llama-batched-bench` builds it and prints the folder. The files
take turns, --rounds times; a figure is the median of the rounds.

Bytes are those of the weights that a step reads, from the file's own tensor table: the trunk's blocks and the
output head, which is the embedding where the two are tied. A draft reads the MTP block and the head.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Literal

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.ceiling import BatchedRow, parse_batched
from bench.environment import card, host, versions
from bench.errors import BenchError
from bench.options import HelpFormatter, add_output_options, positive, positives, run
from bench.plot import PALETTE, figure
from bench.progress import Progress
from bench.publish import publish
from bench.results import Record, ResultFile
from bench.table import Cell, Table
from convert.errors import ConvertError
from convert.gguf_header import TensorInfo, read_tensors

PROGRAM = "llama-batched-bench"
PROMPT_TOKENS = 16  # read before the steps that are timed; a cache as good as empty


class Step(Record):
    """Seconds of one step of ``sequences`` sequences: the median, and each round's mean."""

    sequences: int
    seconds: float
    rounds: list[float]


class FileSteps(Record):
    """One GGUF: what it holds, the bytes that a step and a draft read (no draft: None), and its steps."""

    file: str
    bytes: int
    tokens: int
    head_type: str
    head_bytes: int
    step_bytes: int
    draft_bytes: int | None
    steps: list[Step]


class StepsResult(ResultFile):
    """The result file of ``bench.steps``; ratios are to the first file."""

    kind: Literal["steps"] = "steps"
    program: list[str]
    output_tokens: int
    files: list[FileSteps]


def steps(args: argparse.Namespace) -> int:
    """The verb."""
    began, started = perf_counter(), datetime.now(UTC).replace(microsecond=0)
    described = [describe(path) for path in args.gguf]
    if len({path.name for path in args.gguf}) < len(args.gguf):
        raise BenchError("two files have one name: the table could not tell them apart")
    measured: list[list[BatchedRow]] = [[] for _ in args.gguf]
    with Progress("steps", total=args.rounds * len(args.gguf), unit="run") as bar:
        for _ in range(args.rounds):
            for path, rows in zip(args.gguf, measured, strict=True):
                rows += run_program(command(args, path), args.binaries, args.timeout)
                bar.advance(note=path.name)
    files = [
        one.model_copy(update={"steps": summarize(rows)})
        for one, rows in zip(described, measured, strict=True)
    ]
    result = StepsResult(
        command=args.command,
        url="file:" + str(args.gguf[0].parent),
        model=None,
        started=started,
        seconds=perf_counter() - began,
        host=host(),
        card=card("http://localhost", args.card),
        versions=versions(),
        program=command(args, args.gguf[0]),
        output_tokens=args.output_tokens,
        files=files,
    )
    publish(result, args, tables, draw)
    return 0


def describe(path: Path) -> FileSteps:
    """A file's bytes by what reads them. Raises BenchError: it is missing, or no GGUF of a language model."""
    try:
        tensors = {tensor.name: tensor for tensor in read_tensors(path)}
    except ConvertError as error:
        raise BenchError(str(error)) from error
    except OSError as error:
        raise BenchError(f"{path}: cannot be read: {error.strerror}") from error
    head = tensors.get("output.weight") or tensors.get("token_embd.weight")
    if head is None:
        raise BenchError(f"{path}: no tensor output.weight or token_embd.weight; is it a language model?")
    draft_blocks = {block(name) for name in tensors if ".nextn." in name}
    blocks = [tensor for name, tensor in tensors.items() if name.startswith("blk.")]
    drafting = [tensor for tensor in blocks if block(tensor.name) in draft_blocks]
    # an embedding of its own is read a row at a time
    block_bytes = total(blocks) - total(drafting)
    draft_bytes = total(tensor for tensor in drafting if not tensor.name.endswith("embed_tokens.weight"))
    return FileSteps(
        file=path.name,
        bytes=path.stat().st_size,
        tokens=head.shape[1],
        head_type=head.type.name,
        head_bytes=head.n_bytes,
        step_bytes=block_bytes + head.n_bytes + tensors["output_norm.weight"].n_bytes,
        draft_bytes=draft_bytes + head.n_bytes if drafting else None,
        steps=[],
    )


def block(name: str) -> str:
    """`blk.3.` of `blk.3.attn_q.weight`."""
    return ".".join(name.split(".")[:2])


def total(tensors: Iterable[TensorInfo]) -> int:
    """Bytes of some tensors."""
    return sum(tensor.n_bytes for tensor in tensors)


def command(args: argparse.Namespace, path: Path) -> list[str]:
    """llama-batched-bench on one file."""
    most = max(args.sequences)
    made = [str(args.binaries / PROGRAM), "-m", str(path), "-ngl", str(args.gpu_layers)]
    made += ["-c", str(most * (PROMPT_TOKENS + args.output_tokens)), "-npp", str(PROMPT_TOKENS)]
    made += ["-ntg", str(args.output_tokens), "-npl", ",".join(map(str, args.sequences))]
    made += ["--output-format", "jsonl"]
    return made + (["-t", str(args.threads), "-tb", str(args.threads)] if args.threads else [])


def run_program(command: Sequence[str], binaries: Path, timeout: float) -> list[BatchedRow]:
    """One run's rows. Raises BenchError: the program is missing, fails, or takes longer than ``timeout``."""
    libraries = os.pathsep.join(filter(None, [str(binaries), os.environ.get("LD_LIBRARY_PATH")]))
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={**os.environ, "LD_LIBRARY_PATH": libraries},
        )
    except OSError as error:
        raise BenchError(f"--binaries: cannot run {command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"{command[0]}: not done within {timeout:g} s (--timeout)") from error
    if done.returncode != 0:
        raise BenchError(f"{' '.join(command)} failed:\n{done.stderr[-1500:]}")
    return parse_batched(done.stdout)


def summarize(rows: Sequence[BatchedRow]) -> list[Step]:
    """A step's seconds by number of sequences, over all rounds."""
    found = []
    for sequences in dict.fromkeys(row.sequences for row in rows):
        rounds = [row.decode_seconds / row.output_tokens for row in rows if row.sequences == sequences]
        found.append(Step(sequences=sequences, seconds=median(rounds), rounds=rounds))
    return found


def tables(result: StepsResult) -> list[Table]:
    """A row a file."""
    first = result.files[0]
    counts = [step.sequences for step in first.steps]
    rows: list[list[Cell]] = []
    for one in result.files:
        cells: list[Cell] = [one.file, one.head_type, one.tokens, one.head_bytes / 1e6, one.step_bytes / 1e6]
        cells.append(None if one.draft_bytes is None else one.draft_bytes / 1e6)
        for step, base in zip(one.steps, first.steps, strict=True):
            cells += [f"{1000 * step.seconds:.3f}", f"{100 * (step.seconds / base.seconds - 1):+.1f}%"]
        rows.append(cells)
    header = ["file", "head", "tokens", "head MB", "MB a step", "MB a draft"]
    for count in counts:
        header += [f"ms, {count} seq.", "vs first"]
    return [Table(header, rows, title=f"Decode steps on {result.card or 'the CPU'}, medians of rounds")]


def draw(result: StepsResult, path: Path) -> None:
    """A panel for each number of sequences: a bar a file, every round a dot."""
    counts = [step.sequences for step in result.files[0].steps]
    names = [one.file.removesuffix(".gguf") for one in result.files]
    title = f"Milliseconds a decode step, {result.card or 'CPU'}"
    width, height = 4.2 * len(counts), 1.6 + 0.5 * len(names)
    with figure(path, title=title, columns=len(counts), width=width, height=height) as axes:
        for i, (axis, count) in enumerate(zip(axes, counts, strict=True)):
            taken = [one.steps[i] for one in result.files]
            axis.barh(names, [1000 * step.seconds for step in taken], color=PALETTE[0], alpha=0.8)
            for y, step in enumerate(taken):
                axis.plot([1000 * one for one in step.rounds], [y] * len(step.rounds), "k.", markersize=4)
            axis.invert_yaxis()
            axis.set_title(f"{count} sequence{'s' if count > 1 else ''}")
            axis.grid(visible=False, axis="y")
            if i:
                axis.set_yticklabels([])


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python bench/steps.py", description=__doc__, formatter_class=HelpFormatter
    )
    made.add_argument(
        "gguf", type=Path, nargs="+", metavar="GGUF", help="the first is what others compare with"
    )
    made.add_argument("--binaries", type=Path, required=True, metavar="DIR", help=f"that holds {PROGRAM}")
    made.add_argument(
        "--sequences", type=positives, default=[1, 8, 64], metavar="A,B", help="decoded at once"
    )
    made.add_argument("--output-tokens", type=positive, default=64, metavar="N", help="steps a run")
    made.add_argument("--rounds", type=positive, default=3, metavar="N", help="turns of every file")
    made.add_argument("--threads", type=positive, metavar="N", help="CPU threads (the program's own choice)")
    made.add_argument("--gpu-layers", type=int, default=99, metavar="N", help="layers on the GPU")
    made.add_argument("--timeout", type=float, default=600.0, help="seconds a run may take")
    made.add_argument("--card", help="the graphics card, for the record (nvidia-smi is asked otherwise)")
    add_output_options(made)
    return made


if __name__ == "__main__":
    sys.exit(run(parser(), steps))
