"""``qwen-bench record``: measurements of an hour on one GPU, as a file and a page."""

import asyncio
import hashlib
import platform
import socket
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from qwen_serve.bench import provenance
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.experiments import run as series
from qwen_serve.bench.experiments.run import Experiment, finished_run
from qwen_serve.bench.gates.gate import NANO_NAMES, OFFICIAL
from qwen_serve.bench.record.clocks import clocks, sampled
from qwen_serve.bench.record.document import Machine, Model, Record, Row, plain, plain_versions, rows_of
from qwen_serve.bench.record.page import html, tables
from qwen_serve.bench.servers.launch import PYTHON_PATH, ServerProcess
from qwen_serve.bench.store import load, write_atomically

GATES = {"official": tuple(gate.name for gate in OFFICIAL), "nano": NANO_NAMES}
GATES_PART = "gates"
JSON, PAGE, CLOCKS = "record.json", "record.html", "clocks.jsonl"


def record(
    model: Path,
    /,
    *,
    tasks: str = "official",
    quick: Annotated[bool, Parameter(negative=())] = False,
    port: int = 8098,
    out: Path | None = None,
) -> int:
    """Measurements of an hour on one GPU, in one file to send in: start, latency, throughput at 1, 8 and 64
    concurrent requests, and a tenth of the quality gates.

    - `qwen-bench record models/Qwen3.5-4B-Q4_K_M.gguf`
    - `qwen-bench record models/nano-Q4_K_M.gguf --tasks nano --quick`

    The command runs qwen-serve with its defaults and the bundled experiment `card`. OUT/record.json has the
    results and names the GPU, its driver and clocks, the processor, versions and the model's file. It
    contains no host name, user, path or key. OUT/record.html shows it. After an interruption both files have
    the finished parts, and the same command continues.

    Parameters
    ----------
    model
        The model's GGUF file.
    tasks
        Quality gates. official: MMLU-Pro, IFEval, GPQA-Diamond and GSM8K, fetched from the hub. nano: those
        of the bundled model.
    quick
        Only check that everything runs; such a record cannot be sent in.
    port
        Port of the server for the gates.
    out
        Store, and folder of the file and the page (default: results/record, or results/record-quick).
    """
    if not model.is_file():
        raise BenchError(f"{model}: not a file; want a GGUF")
    if tasks not in GATES:
        raise BenchError(f"--tasks {tasks}: want {' or '.join(GATES)}")
    described = Experiment.read(Path("card-quick" if quick else "card"))
    out = out or Path("results/record-quick" if quick else "results/record")
    variables = {"gguf": str(model.resolve()), "url": f"http://127.0.0.1:{port}", "tasks": tasks}
    lines = {
        part.name: [*described.words(part, variables, {}), "--out", str(out / part.name)]
        for part in described.parts
        if part.name != GATES_PART
    }
    (gates,) = (part for part in described.parts if part.name == GATES_PART)
    asked = {
        gate: [*described.words(gates, {**variables, "tasks": gate}, {}), "--out", str(out / gate)]
        for gate in GATES[tasks]
    }
    out.mkdir(parents=True, exist_ok=True)
    # parts run outside the event loop: inside, asyncio would delay Ctrl-C until all of them are done
    try:
        with sampled(out / CLOCKS), asyncio.Runner() as runner:
            for name, words in lines.items():
                _measure(name, words, out)
            if any(finished_run(words, out / name) is None for name, words in asked.items()):
                _free(port)
                server = _server(variables["gguf"], port, out / "server.log")
                runner.run(server.start())
                try:
                    for name, words in asked.items():
                        _measure(name, words, out)
                finally:
                    runner.run(server.stop())
    except (KeyboardInterrupt, SystemExit):
        _write(make(model, {**lines, **asked}, out, quick=quick), out)
        print("what is finished is kept: the same command goes on", file=sys.stderr)
        raise
    made = make(model, {**lines, **asked}, out, quick=quick)
    _write(made, out)
    for table in tables(made):
        table.print()
    print(f"wrote {out / JSON} and {out / PAGE}")
    missing = [name for name, state in made.parts.items() if state == "missing"]
    if missing:
        print(f"missing: {', '.join(missing)}; the same command measures them", file=sys.stderr)
    return 1 if missing else 0


def make(model: Path, lines: dict[str, list[str]], out: Path, *, quick: bool) -> Record:
    """The record of a store's finished parts. ``lines``: command line of each part, by name."""
    found = {name: finished_run(words, out / name) for name, words in lines.items()}
    rows: list[Row] = []
    for name, folder in found.items():
        rows += rows_of(name, load([folder])) if folder is not None else []
    card, driver = provenance.card()
    host = provenance.host()
    with model.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Record(
        made=datetime.now(UTC).date(),
        quick=quick,
        model=Model(file=plain(model.name), bytes=model.stat().st_size, sha256=digest),
        machine=Machine(
            card=plain(card) if card else None,
            driver=plain(driver) if driver else None,
            processor=plain(host["processor"]),
            cores=int(host["cores"]),
            memory=host["memory"],
            system=plain(" ".join([platform.system(), platform.machine(), *platform.libc_ver()]).strip()),
        ),
        versions=plain_versions(provenance.versions()),
        commit=provenance.commit(),
        clocks=clocks(out / CLOCKS),
        parts={name: "missing" if folder is None else "finished" for name, folder in found.items()},
        rows=rows,
    )


def _write(made: Record, out: Path) -> None:
    write_atomically(out / JSON, made.text())
    write_atomically(out / PAGE, html(made))


def _measure(name: str, words: list[str], out: Path) -> None:
    state = "is there" if finished_run(words, out / name) is not None else series.run_part(words)
    print(f"{name}: {state}", file=sys.stderr, flush=True)


def _free(port: int) -> None:
    """Raises BenchError if the port is taken, since another server would be measured."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise BenchError(f"--port {port}: something listens there; want a free one for the gates' server")


def _server(gguf: str, port: int, log: Path) -> ServerProcess:
    """qwen-serve with its defaults, for the gates."""
    command = [sys.executable, "-m", "qwen_serve.server", "--model", gguf, "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    return ServerProcess(
        "qwen-serve", command, url, ready_path="/ping", log=log, environment=dict(PYTHON_PATH)
    )
