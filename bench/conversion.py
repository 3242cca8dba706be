"""Conversion speed and memory: `python -m convert` against llama.cpp's convert_hf_to_gguf.py, in turns.

A checkpoint of Qwen3.5-4B's shapes with random weights is made on the spot and converted to F16 by both, each
in a fresh process, several times, taking turns. llama.cpp's converter needs torch and transformers (the extra
`reference`) and its sources (`vendor/llama.cpp` in the sdist of llama-cpp-python).
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
from gguf import GGUFReader
from pydantic import Field

from bench.environment import host, versions
from bench.errors import BenchError
from bench.options import HelpFormatter, positive, run
from bench.results import Record
from bench.synthetic_checkpoint import qwen35_4b, write_checkpoint
from bench.table import Table

ROOT = Path(__file__).resolve().parents[1]
NANO = ROOT / "models" / "nano"
NAME = "synthetic-4B"
GB = 1e9
SAMPLE_S = 0.02
PACKAGES = ("gguf", "numpy", "torch", "transformers")


@dataclass(frozen=True)
class Program:
    """A converter: what it is called, the file it writes, and its command line after `python`."""

    name: str
    output: Path
    command: list[str]


class Run(Record):
    """One conversion. `rss_bytes`: the peak, mapped files included; `anonymous_bytes`: without them,
    sampled."""

    program: str
    seconds: float
    cpu_seconds: float
    rss_bytes: int
    anonymous_bytes: int
    written_bytes: int


class ConversionResult(Record):
    """What was converted where, every run, and how the outputs compare."""

    kind: str = "conversion"
    command: list[str]
    started: datetime
    host: dict[str, str]
    versions: dict[str, str]
    checkpoint_bytes: int
    runs: list[Run]
    tensors_equal: int
    tensors_differing: list[str] = Field(description="by more than one last bit")
    notes: list[str] = Field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write as JSON under a temporary name, then rename."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        part.replace(path)


def main(argv: Sequence[str] | None = None) -> int:
    """The verb."""
    parser = argparse.ArgumentParser(
        prog="python bench/conversion.py", description=__doc__, formatter_class=HelpFormatter
    )
    parser.add_argument("--llama-cpp", type=Path, required=True, help="llama.cpp's sources")
    parser.add_argument("--runs", type=positive, default=3, help="of each program")
    parser.add_argument(
        "--work", type=Path, help="folder for 27 GB of temporary files (the system's own else)"
    )
    parser.add_argument("--out", type=Path, help="results file (JSON)")
    parser.add_argument("--note", help="kept in the results file, such as what else ran on the machine")
    return run(parser, measure, argv)


def measure(args: argparse.Namespace) -> int:
    """Makes the checkpoint, runs both programs in turns, compares their last outputs, reports."""
    if not (args.llama_cpp / "convert_hf_to_gguf.py").is_file():
        raise BenchError(f"--llama-cpp {args.llama_cpp}: has no convert_hf_to_gguf.py")
    started = datetime.now(UTC).replace(microsecond=0)
    with tempfile.TemporaryDirectory(prefix="bench-conversion-", dir=args.work) as temporary:
        work = Path(temporary)
        size = write_checkpoint(work / NAME, qwen35_4b(), NANO)
        programs = (ours(work / NAME, work / "ours"), theirs(work / NAME, work / "theirs", args.llama_cpp))
        runs = []
        for _ in range(args.runs):
            for program in programs:
                shutil.rmtree(program.output.parent, ignore_errors=True)
                program.output.parent.mkdir()
                os.sync()  # what the run before left to be written is not this run's to wait for
                runs.append(convert(program))
                print(f"{program.name}: {runs[-1].seconds:.1f} s", file=sys.stderr)
        equal, differing = compare(*(program.output for program in programs))
    result = ConversionResult(
        command=args.command,
        started=started,
        host=host(),
        versions=versions() | {package: version(package) for package in PACKAGES},
        checkpoint_bytes=size,
        runs=runs,
        tensors_equal=equal,
        tensors_differing=differing,
        notes=[args.note] if args.note else [],
    )
    print(table(result))
    if args.out is not None:
        result.save(args.out)
    return 0


def ours(checkpoint: Path, out: Path) -> Program:
    """This repository's converter, by its command line: it also checks, digests and lists what it wrote."""
    command = ["-m", "convert", "--src", str(checkpoint), "--quant", "F16", "--out", str(out)]
    return Program("python -m convert", out / f"{checkpoint.name}-F16.gguf", command)


def theirs(checkpoint: Path, out: Path, llama_cpp: Path) -> Program:
    """llama.cpp's converter, with its defaults."""
    output = out / "theirs.gguf"
    paths = [str(llama_cpp.resolve()), str(checkpoint), str(output)]
    return Program("convert_hf_to_gguf.py", output, ["-m", "bench.llama_cpp_converter", *paths, "f16"])


def convert(program: Program) -> Run:
    """Runs one conversion in a process of its own and watches its time and memory."""
    start = perf_counter()
    process = subprocess.Popen(
        [sys.executable, *program.command],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    messages: list[str] = []
    reader = threading.Thread(target=lambda stream: messages.extend(stream), args=(process.stderr,))
    reader.start()
    anonymous = 0
    while (waited := os.wait4(process.pid, os.WNOHANG))[0] == 0:
        anonymous = max(anonymous, anonymous_bytes(process.pid))
        sleep(SAMPLE_S)
    seconds = perf_counter() - start
    reader.join()
    _, status, usage = waited
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise BenchError(f"{program.name} failed:\n{''.join(messages[-20:])}")
    return Run(
        program=program.name,
        seconds=seconds,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        rss_bytes=usage.ru_maxrss * 1024,
        anonymous_bytes=anonymous,
        written_bytes=program.output.stat().st_size,
    )


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that no file backs, now; 0 once it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def compare(ours: Path, theirs: Path) -> tuple[int, list[str]]:
    """How many tensors hold the same bits, and which differ by more than one last bit."""
    others = {tensor.name: tensor for tensor in GGUFReader(theirs).tensors}
    equal, differing = 0, []
    for tensor in GGUFReader(ours).tensors:
        other = others.pop(tensor.name, None)
        if other is not None and np.array_equal(tensor.data, other.data):
            equal += 1
        elif other is None or not np.allclose(tensor.data, other.data, rtol=2**-22, atol=0):
            differing.append(tensor.name)
    return equal, differing + list(others)


def table(result: ConversionResult) -> Table:
    """Medians by program."""
    rows: list[list[str | float]] = []
    for program in dict.fromkeys(one.program for one in result.runs):
        runs = [one for one in result.runs if one.program == program]
        figures = [
            median(one.seconds for one in runs),
            median(one.cpu_seconds for one in runs),
            median(one.rss_bytes for one in runs) / GB,
            median(one.anonymous_bytes for one in runs) / GB,
        ]
        rows.append([program, *figures, result.checkpoint_bytes / GB / figures[0]])
    return Table(
        header=["program", "seconds", "CPU seconds", "peak RSS, GB", "of it anonymous", "GB/s read"],
        rows=rows,
        title=f"{result.checkpoint_bytes / GB:.2f} GB, BF16 to F16, medians of {len(result.runs) // 2}",
        notes=[f"{result.tensors_equal} tensors equal bit by bit, {len(result.tensors_differing)} differ"],
    )


if __name__ == "__main__":
    sys.exit(main())
