"""``qwen-bench start``: time from a server's command to its first 200, and qwen-serve's stages."""

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from cyclopts import Parameter

from qwen_serve.bench.analysis.statistics import DEFAULT_ROUNDS, compare_subjects, percentiles
from qwen_serve.bench.arguments import Natural, Positive, StoreOptions
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.report.views import show
from qwen_serve.bench.servers.launch import ServerProcess
from qwen_serve.bench.servers.programs import Peer, Setup, parse_peer, process_of
from qwen_serve.bench.store import Results
from qwen_serve.bench.terminal import Bar, Cell, Table

VERB, METRIC, READY, REST = "start", "start_time", "ready", "outside the engine"
POLL_SECONDS = 0.02
STAGES = re.compile(r" start: (.* s)$", re.MULTILINE)
"""Matches the stages of a start in qwen-serve's log: "start: plan 0.01 s, weights 0.31 s"."""
STAGE = re.compile(r"([a-z ]+?) ([\d.]+) s")


async def start(
    *,
    gguf: Path,
    peer: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    binaries: Path | None = None,
    rounds: Positive = DEFAULT_ROUNDS,
    slots: Positive = 8,
    context: Positive = 32_768,
    threads: Natural = 0,
    python: str = sys.executable,
    start_timeout: float = 300.0,
    store: StoreOptions = StoreOptions(),
) -> int:
    """Start times of servers, from the command to the first 200, in turns; of qwen-serve also by stage.

    - `qwen-bench start --gguf model.gguf`
    - `qwen-bench start --gguf model.gguf --peer server --peer llama-server:tuned --rounds 3`

    The first start of each server is not timed: it brings the file into the page cache, and qwen-serve stores
    its measurements. Stages are those of qwen-serve's log; the rest is the interpreter, imports and HTTP.

    Parameters
    ----------
    gguf
        The model's GGUF file.
    peer
        Server, as [NAME=]WHAT [FLAGS] of qwen-bench peers; once for each server (default: server, server with
        --no-remember, and with --binaries llama-server:tuned).
    binaries
        Folder of llama-server.
    rounds
        Timed starts of each server.
    slots
        Slots of each server, the maximum of concurrent requests.
    context
        Context of each server in tokens, for all slots together.
    threads
        CPU threads of each server; 0: the server's default.
    python
        Python interpreter for servers written in Python.
    start_timeout
        Time limit of a start, in seconds.
    """
    found = [parse_peer(text) for text in peer] or usual_peers(binaries)
    if running := [one.name for one in found if one.url is not None]:
        raise BenchError(f"--peer {running[0]}: runs already; want programs that can be started")
    if binaries is None and any(one.program == "llama-server" for one in found):
        raise BenchError("--peer llama-server: want --binaries, its folder (qwen-bench build llama-server)")
    if not gguf.is_file():
        raise BenchError(f"--gguf {gguf}: not a file")
    settings = {"gguf": gguf.name, "gguf_bytes": gguf.stat().st_size, "rounds": rounds}
    settings |= {"slots": slots, "context": context, "threads": threads}
    with store.begin(VERB, settings) as run, TemporaryDirectory() as cache:
        setup = Setup(
            gguf, slots, context, threads, binaries or Path(), python, run.folder / "logs", start_timeout
        )
        with Bar("starts", total=(rounds + 1) * len(found), unit="starts") as bar:
            for number in range(rounds + 1):
                first = number % len(found)
                for one in (*found[first:], *found[:first]):
                    process = process_of(one, setup)
                    process.environment["QWEN_SERVE_CACHE"] = cache
                    times = await started(process)
                    bar.advance(note=one.name)
                    if number == 0:
                        run.describe(one.name, program=one.program, command=process.command)
                        continue
                    for stage, seconds in times.items():
                        run.add(one.name, VERB, stage, number, {METRIC: seconds})
        show(run)
    return 0


def usual_peers(binaries: Path | None) -> list[Peer]:
    """qwen-serve with and without remembered measurements, and llama-server if its folder is given."""
    ours = [Peer("qwen-serve", "server"), Peer("qwen-serve, measuring", "server", ("--no-remember",))]
    return (
        ours if binaries is None else [*ours, replace(parse_peer("llama-server:tuned"), name="llama-server")]
    )


async def started(process: ServerProcess) -> dict[str, float]:
    """Start a server and stop it. Returns the seconds of the start, by stage if the log has stages. Raises
    BenchError if the server does not start."""
    process.poll = POLL_SECONDS
    async with process:
        ready = process.start_seconds
    log = process.log.read_text(encoding="utf-8", errors="replace") if process.log is not None else ""
    return {READY: ready, **stages(log, ready)}


def stages(log: str, ready: float) -> dict[str, float]:
    """Seconds of each stage in qwen-serve's log, and the rest of `ready` seconds; empty for other servers."""
    line = STAGES.search(log)
    if line is None:
        return {}
    told = {name.strip(): float(seconds) for name, seconds in STAGE.findall(line[1])}
    return {REST: max(0.0, ready - sum(told.values())), **told}


def start_tables(results: Results) -> Sequence[Table]:
    """A table with a row for each server: median of the whole start and of each stage, and ratio to the first
    server."""
    frame = results.frame
    known = set(frame["subject"])
    subjects = [name for one in results.manifests.values() for name in one.subjects if name in known]
    spreads = percentiles(frame, METRIC, "subject", "cell")
    lines: list[dict[str, Cell]] = []
    for subject in subjects:
        whole = spreads[subject, READY]
        ratio = compare_subjects(frame[frame["cell"] == READY], subject, subjects[0], METRIC)
        line: dict[str, Cell] = {"server": subject, "ready s": f"{whole.p50:.2f}"}
        line["p10 to p90"] = f"{whole.p10:.2f} to {whole.p90:.2f}"
        line[f"times as good as {subjects[0]}"] = ratio.verdict if ratio is not None else None
        for name in dict.fromkeys(frame["cell"]):
            if name != READY and (subject, name) in spreads:
                line[name] = f"{spreads[subject, name].p50:.2f}"
        lines.append(line)
    return [Table.of(lines, title="From the command to the first 200, seconds; stages by the log")]
