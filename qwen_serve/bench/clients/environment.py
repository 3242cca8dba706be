"""Installs each client's packages in a folder of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

from qwen_serve.bench.clients.catalogue import ClientProgram
from qwen_serve.bench.errors import BenchError


def cache_folder() -> Path:
    """The default folder in which clients are installed."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qwen-bench" / "clients"


def install(program: ClientProgram, folder: Path) -> None:
    """Install a client's packages in ``folder``, unless the same list is installed. Raises BenchError with
    the installer's message."""
    done = folder / "installed.json"
    wanted = json.dumps([program.pip, program.npm])
    if done.is_file() and done.read_text() == wanted:
        return
    print(f"installing {' '.join(program.pip + program.npm)} in {folder}", file=sys.stderr, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    if program.pip:
        run([sys.executable, "-m", "venv", str(folder)], folder)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        run([*pip, "--upgrade", *program.pip], folder)
    if program.npm:
        (folder / "package.json").write_text('{"private": true, "type": "module"}\n')
        run(["npm", "install", "--no-fund", "--no-audit", "--loglevel=error", *program.npm], folder)
    done.write_text(wanted)


def version_of(program: ClientProgram, folder: Path) -> str:
    """The version of the client's main package."""
    name = program.main_package
    if program.npm:
        return str(json.loads((folder / "node_modules" / name / "package.json").read_text())["version"])
    ask = f"from importlib.metadata import version; print(version({name!r}))"
    return run([str(folder / "bin" / "python"), "-c", ask], folder).strip()


def run(command: list[str], folder: Path) -> str:
    """The command's output. Raises BenchError if it fails."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise BenchError(f"{command[0]} is not installed") from None
    if done.returncode:
        raise BenchError(f"{' '.join(command[:4])} ... failed: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout
