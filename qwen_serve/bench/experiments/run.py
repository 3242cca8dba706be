"""Runs a series of measurements from a TOML file: commands with options, one after the other.

    title = "..."
    [needs]                      # values that --set must give: name = description
    models = "folder of F16.gguf and Q4_K_M.gguf"
    [options]                    # of every `peers` part
    residency = "all"
    [peers]                      # by name, with the syntax of --peer
    tuned = "llama-server:tuned"
    [[parts]]
    name = "distinct"            # its folder in the store
    command = "peers"            # the default
    peers = ["ours", "tuned"]
    options = { gguf = "{models}/Q4_K_M.gguf", protocol = "distinct" }

A part is not run again if the store has a finished run of exactly this command.
"""

import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Annotated

from cyclopts import Parameter
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qwen_serve.bench.arguments import Positive, StoreOptions, comma_separated, named_values
from qwen_serve.bench.errors import BenchError, first_problem
from qwen_serve.bench.servers.launch import PYTHON_PATH
from qwen_serve.bench.store import manifests
from qwen_serve.bench.terminal import Cell, Table
from qwen_serve.common.children import sigterm_with_parent

FOLDER = Path(__file__).parent
Option = bool | int | float | str | list[str | int | float]


class Part(BaseModel):
    """A command, such as "latency" or "engine drafts". ``peers``: for the command peers, names of the
    experiment's peers.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    command: str = "peers"
    peers: list[str] = Field(default_factory=list)
    options: dict[str, Option] = Field(default_factory=dict)


class Experiment(BaseModel):
    """The contents of a file."""

    model_config = ConfigDict(extra="forbid")

    title: str
    needs: dict[str, str] = Field(default_factory=dict)
    options: dict[str, Option] = Field(default_factory=dict)
    peers: dict[str, str] = Field(default_factory=dict)
    parts: list[Part]

    @classmethod
    def read(cls, path: Path) -> "Experiment":
        """Read a file, given by path or by the name of a bundled one. Raises BenchError, which says what is
        wrong.
        """
        if not path.is_file():
            path = FOLDER / f"{path}.toml"
        try:
            made = cls.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            known = ", ".join(sorted(one.stem for one in FOLDER.glob("*.toml")))
            raise BenchError(f"{path}: cannot be read; there are {known}") from error
        except tomllib.TOMLDecodeError as error:
            raise BenchError(f"{path}: not TOML: {error}") from error
        except ValidationError as error:
            raise BenchError(f"{path}: {first_problem(error, 'the experiment')}") from error
        for part in made.parts:
            if unknown := [name for name in part.peers if name not in made.peers]:
                raise BenchError(f"{path}: part {part.name}: no peer {unknown[0]!r}")
        return made

    def words(self, part: Part, variables: Mapping[str, str], changed: Mapping[str, Option]) -> list[str]:
        """The part's command line without --out."""
        common = self.options if part.command == "peers" else {}
        options = {**common, **part.options, **(changed if part.command == "peers" else {})}
        words = part.command.split()
        for name, value in options.items():
            words += _flag(name.replace("_", "-"), value, variables)
        for name in part.peers:
            words += ["--peer", _filled(f"{name}={self.peers[name]}", variables)]
        return words


def experiment(
    file: Path,
    /,
    *,
    store: StoreOptions = StoreOptions(),
    set: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    part: Annotated[tuple[str, ...], comma_separated(str)] = (),
    option: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    limit: Positive | None = None,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Run a series of measurements that a TOML file describes. Finished parts in the store are not run again.

    - `qwen-bench experiment hackathon --set url=http://127.0.0.1:8080`
    - `qwen-bench experiment ./mine.toml --part latency --dry-run`

    Parameters
    ----------
    file
        TOML file, or the name of a bundled one.
    set
        Value that the file needs, as NAME=VALUE, such as models=/data; may be repeated.
    part
        Run only these parts, separated by commas.
    option
        Option that overrides the file's in every part, as NAME=VALUE, such as rounds=1; may be repeated.
    limit
        Seconds in all. Each part that compares servers gets a share by their number, after which it begins no
        round.
    dry_run
        Print the commands without running them.
    """
    described = Experiment.read(file)
    variables = named_values(set, "--set")
    if missing := [f"{name} ({what})" for name, what in described.needs.items() if name not in variables]:
        raise BenchError(f"--set: {file} needs {', '.join(missing)}")
    if unknown := [name for name in part if name not in [one.name for one in described.parts]]:
        raise BenchError(f"--part {unknown[0]}: want {', '.join(one.name for one in described.parts)}")
    changed: dict[str, Option] = dict(named_values(option, "--option"))
    lines: list[list[Cell]] = []
    for one in described.parts:
        if part and one.name not in part:
            continue
        if limit is not None:
            shares = [len(other.peers) for other in described.parts if not part or other.name in part]
            changed["limit"] = round(limit * len(one.peers) / max(1, sum(shares)), 1)
        words = described.words(one, variables, changed)
        words += ["--out", str(store.out / one.name)]
        words += ["--card", store.card] if store.card is not None else []
        words += [word for note in store.note for word in ("--note", note)]
        if dry_run:
            print(shlex.join(["qwen-bench", *words]))
            continue
        began = monotonic()
        state = "is there" if finished_run(words, store.out / one.name) else run_part(words)
        lines.append([one.name, state, (monotonic() - began) / 60])
        print(f"{one.name}: {state}", file=sys.stderr, flush=True)
    if lines:
        Table(["part", "state", "minutes"], lines, title=described.title).print()
    return 1 if any(state not in ("finished", "is there") for _, state, _ in lines) else 0


def run_part(words: Sequence[str]) -> str:
    """Run a part in a separate process. Returns its outcome in words."""
    process = subprocess.Popen(
        [sys.executable, "-m", "qwen_serve.bench", *words],
        env={**os.environ, **PYTHON_PATH},
        preexec_fn=sigterm_with_parent(),
    )
    try:
        status = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    return "finished" if status == 0 else f"exit status {status}"


def finished_run(words: Sequence[str], folder: Path) -> Path | None:
    """The folder of a command's last finished run in ``folder``; None without one."""
    wanted = ["qwen-bench", *words]
    found = manifests(folder).items()
    done = [run for run, one in found if one.command == wanted and one.status == "finished"]
    return done[-1] if done else None


def _flag(name: str, value: Option, variables: Mapping[str, str]) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return [f"--{name}", _filled(text, variables)] if name != "argument" else [_filled(text, variables)]


def _filled(text: str, variables: Mapping[str, str]) -> str:
    try:
        return text.format_map(variables)
    except (KeyError, ValueError, IndexError) as error:
        raise BenchError(f"{text}: {error} is not in the file's [needs]") from error
