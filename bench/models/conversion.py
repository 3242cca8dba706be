"""Conversion speed and memory: `python -m convert` against llama.cpp's convert_hf_to_gguf.py, in turns."""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from time import perf_counter, sleep

import numpy as np
from gguf import GGUFReader

from bench.analysis.statistics import DEFAULT_ROUNDS
from bench.arguments import Positive, StoreOptions
from bench.errors import BenchError
from bench.models.checkpoint import qwen35_4b, write_checkpoint
from bench.models.vocab import NANO
from bench.report.tables import subjects_table
from bench.store import Run
from bench.terminal import Bar

ROOT = Path(__file__).resolve().parents[2]
NAME = "synthetic-4B"
GB = 1e9
SAMPLE_S = 0.02
PACKAGES = ("gguf", "numpy", "torch", "transformers")
MEASURED = ("conversion_time", "cpu_time", "peak_rss", "peak_anonymous")


@dataclass(frozen=True, slots=True)
class Program:
    """A converter: what it is called, the file it writes, and its command line after `python`."""

    name: str
    output: Path
    command: list[str]


def conversion(
    *,
    llama_cpp: Path,
    rounds: Positive = DEFAULT_ROUNDS,
    work: Path | None = None,
    store: StoreOptions = StoreOptions(),
) -> int:
    """Conversion speed and memory beside llama.cpp's own converter, in turns.

    A checkpoint of Qwen3.5-4B's shapes with random weights is made on the spot and converted to F16 by both,
    each time in a fresh process. llama.cpp's converter needs torch and transformers (the extra `reference`).

    Parameters
    ----------
    llama_cpp
        llama.cpp's sources (vendor/llama.cpp in the sdist of llama-cpp-python).
    rounds
        Conversions by each program.
    work
        Folder for 27 GB of temporary files (else the system's own).
    """
    if not (llama_cpp / "convert_hf_to_gguf.py").is_file():
        raise BenchError(f"--llama-cpp {llama_cpp}: has no convert_hf_to_gguf.py")
    settings = {"rounds": rounds, "outtype": "f16", "model": NAME}
    with (
        tempfile.TemporaryDirectory(prefix="bench-conversion-", dir=work) as temporary,
        Run.begin(store.out, "conversion", settings=settings, card=store.card, notes=store.note) as run,
    ):
        folder = Path(temporary)
        size = write_checkpoint(folder / NAME, qwen35_4b(), NANO)
        programs = (ours(folder / NAME, folder / "ours"), theirs(folder / NAME, folder / "theirs", llama_cpp))
        versions = {package: version(package) for package in PACKAGES}
        for program in programs:
            run.describe(program.name, checkpoint_bytes=size, versions=versions)
        try:
            in_turns(run, programs, rounds)
            equal, differing = compare(*(program.output for program in programs))
            names = ": " + ", ".join(differing) if differing else ""
            run.note(f"{equal} tensors equal bit by bit, {len(differing)} differ{names}")
        finally:
            subjects_table(run.results(), MEASURED, reference=programs[1].name).print()
    return 0


def in_turns(run: Run, programs: Sequence[Program], rounds: int) -> None:
    """Every round each program once, each time beginning with another one."""
    with Bar("conversions", total=rounds * len(programs), unit="conversions") as bar:
        for round in range(1, rounds + 1):
            first = round % len(programs)
            for program in (*programs[first:], *programs[:first]):
                shutil.rmtree(program.output.parent, ignore_errors=True)
                program.output.parent.mkdir()
                os.sync()  # what the run before left to be written is not this run's to wait for
                found = convert(program)
                run.add(program.name, "conversion", NAME, round, found)
                bar.advance(note=f"{program.name}: {found['conversion_time']:.1f} s")


def ours(checkpoint: Path, out: Path) -> Program:
    """This repository's converter, by its command line: it also checks, digests and lists what it wrote."""
    command = ["-m", "convert", "--src", str(checkpoint), "--quant", "F16", "--out", str(out)]
    return Program("python -m convert", out / f"{checkpoint.name}-F16.gguf", command)


def theirs(checkpoint: Path, out: Path, llama_cpp: Path) -> Program:
    """llama.cpp's converter, with its defaults."""
    output = out / "theirs.gguf"
    paths = [str(llama_cpp.resolve()), str(checkpoint), str(output)]
    return Program("convert_hf_to_gguf.py", output, ["-m", "bench.models.llama_cpp_converter", *paths, "f16"])


def convert(program: Program) -> dict[str, float]:
    """Runs one conversion in a process of its own and watches its time and memory.

    Returns metrics by name; peak_rss counts mapped files, peak_anonymous does not and is sampled.
    """
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
    return {
        "conversion_time": seconds,
        "cpu_time": usage.ru_utime + usage.ru_stime,
        "peak_rss": usage.ru_maxrss * 1024 / GB,
        "peak_anonymous": anonymous / GB,
        "written": program.output.stat().st_size / GB,
    }


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
