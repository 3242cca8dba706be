"""``qwen-bench conformance clients``: runs the snippets of docs/clients.md with their clients."""

import contextlib
import os
import re
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from time import perf_counter
from typing import Annotated, Literal

from cyclopts import Parameter

from qwen_serve.bench.arguments import SERVER_GROUP, ServerOptions
from qwen_serve.bench.clients.catalogue import CLIENTS, ClientProgram
from qwen_serve.bench.clients.environment import cache_folder, install, version_of
from qwen_serve.bench.clients.snippets import Snippet, read_snippets
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.terminal import Table
from qwen_serve.common.children import sigterm_with_parent

TASKS = Path(__file__).parent / "tasks"
ERROR = re.compile(r"(Error|Exception)\b[^:]*: \S")
EXTENSIONS = {"python": "py", "bash": "sh", "javascript": "mjs"}


@Parameter(name="*", group=SERVER_GROUP)
@dataclass(frozen=True, kw_only=True)
class ServedTo(ServerOptions):
    """The server that the clients use."""

    timeout: float = 180.0
    """Time limit of a snippet, in seconds."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A snippet's outcome. ``detail``: what was wrong, or why the snippet was skipped."""

    status: Literal["pass", "FAIL", "skip"]
    detail: str
    seconds: float


def clients(
    *,
    server: ServedTo = ServedTo(),
    only: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    cache: Path | None = None,
    list_: Annotated[bool, Parameter(name="--list", negative=())] = False,
) -> int:
    """Run the snippets of docs/clients.md, each with its client. The exit status is 1 if one failed.

    - `qwen-bench conformance clients --url http://127.0.0.1:8080`
    - `qwen-bench conformance clients --only 'openai.*'`

    pip or npm installs each client in a folder of its own when it is first needed.

    Parameters
    ----------
    only
        Run only the snippets whose names match this pattern, such as 'openai.*'; may be repeated.
    cache
        Folder in which clients are installed (default: ~/.cache/qwen-bench/clients).
    list_
        Print the names of the snippets, and exit.
    """
    snippets = [s for s in read_snippets() if not only or any(fnmatch(s.label, pattern) for pattern in only)]
    if not snippets:
        raise BenchError(f"no snippet is named {', '.join(only)}: see --list")
    if list_:
        print("\n".join(snippet.label for snippet in snippets))
        return 0
    root = (cache or cache_folder()).resolve()
    rows: list[tuple[str, str, str, float, str]] = []
    ready: dict[str, tuple[str, str]] = {}
    for number, snippet in enumerate(snippets, 1):
        if snippet.client not in ready:
            ready[snippet.client] = prepare(snippet.client, root / snippet.client)
        version, problem = ready[snippet.client]
        outcome = Outcome("skip", problem, 0.0) if problem else attempt(snippet, server, root)
        print(
            f"{number:3}/{len(snippets)} {outcome.status:5} {snippet.label:34} {outcome.detail}", flush=True
        )
        rows.append((snippet.label, version, outcome.status, outcome.seconds, outcome.detail))
    print()
    Table(("client", "version", "result", "seconds", "why"), rows, title=f"Clients of {server.url}").print()
    return 1 if any(status == "FAIL" for _, _, status, _, _ in rows) else 0


def prepare(client: str, folder: Path) -> tuple[str, str]:
    """Install a client. Returns (version, ""), or ("", why it cannot run here)."""
    try:
        install(CLIENTS[client], folder)
        return version_of(CLIENTS[client], folder), ""
    except (BenchError, OSError) as error:
        return "", last_line(str(error))


def attempt(snippet: Snippet, server: ServedTo, root: Path) -> Outcome:
    """Run one snippet and its check."""
    program, folder = CLIENTS[snippet.client], root / snippet.client
    text = snippet.pointed_at(server.url.rstrip("/"), server.api_key, TASKS)
    check = program.checks[snippet.name]
    began = perf_counter()
    with tempfile.TemporaryDirectory() as work:
        if snippet.language == "python":
            text += f"\n{check}\n"
        # Node.js looks for node_modules in the script's folder and above
        home = folder if snippet.language == "javascript" else Path(work)
        script = home / f"snippet-{snippet.name}.{EXTENSIONS[snippet.language]}"
        script.write_text(text, encoding="utf-8")
        interpreter = {"python": str(folder / "bin" / "python"), "bash": "bash", "javascript": "node"}
        command = [interpreter[snippet.language], *["-e"] * (snippet.language == "bash"), str(script)]
        status, printed, errors = execute(
            command, Path(work), environment(program, folder, work), server.timeout
        )
        script.unlink()
    detail = ""
    if status is None:
        detail = f"not done within {server.timeout:g} s (--timeout)"
    elif status != 0:
        detail = last_line(errors or printed) or f"exit status {status}"
    elif snippet.language != "python":
        try:
            exec(check, {"printed": printed})  # code of catalogue.py
        except Exception as error:
            detail = f"{type(error).__name__}: {error} {last_line(errors)}"
    seconds = perf_counter() - began
    return Outcome("FAIL" if detail else "pass", detail[:300], seconds)


def environment(program: ClientProgram, folder: Path, work: str) -> dict[str, str]:
    """Environment variables with the client's programs first on the path, a home of its own, and no keys of
    other services.
    """
    path = f"{folder / 'bin'}:{folder / 'node_modules' / '.bin'}:{os.environ['PATH']}"
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OPENAI_", "ANTHROPIC_", "CLAUDE", "PYTHON", "VIRTUAL_ENV", "QWEN_"))
    }
    return {**kept, "PATH": path, "HOME": work, "XDG_CONFIG_HOME": f"{work}/.config", **program.environment}


def execute(
    command: list[str], folder: Path, variables: dict[str, str], limit: float
) -> tuple[int | None, str, str]:
    """(exit status, stdout, stderr); the status is None after ``limit`` seconds. All processes that the
    command started are ended.
    """
    with (folder / "stdout").open("w+b") as out, (folder / "stderr").open("w+b") as err:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            preexec_fn=sigterm_with_parent(),
        )
        status: int | None
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        err.seek(0)
        return status, out.read().decode(errors="replace"), err.read().decode(errors="replace")


def last_line(text: str) -> str:
    """The line that probably explains an error: the last one that names an error, else the last one."""
    lines = [line.strip() for line in text.splitlines() if any(char.isalnum() for char in line)]
    wrong = [line for line in lines if ERROR.search(line)]
    return (wrong or lines or [""])[-1][:300]
