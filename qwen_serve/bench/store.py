"""The store of all measurements. Each run is a folder with a manifest and rows; tables and charts are made
from them.

    STORE/2026-11-22T16-40-12-latency/manifest.json   command, commit, card, driver, versions, settings, date
                                      rows.jsonl      subject, workload, cell, round, metric, value, unit
                                      ...             files of the command: replies, server logs

Rows are written as they are measured, in whole lines, so an interrupted run keeps them. The manifest is
written under a temporary name and renamed. A store is any folder with runs at any depth.

- ``subject``: the server, variant or file that is measured.
- ``workload`` and ``cell``: the load, such as "distinct" and "short", or "random" and "8 concurrent".
- ``round``: from 1. Each subject is measured once a round, so statistics pair the values of a round.
- Several values of a metric in one round are samples, for instance one for each request.
"""

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Literal, Self

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qwen_serve.bench import provenance
from qwen_serve.bench.errors import BenchError, first_problem
from qwen_serve.bench.metrics import METRICS
from qwen_serve.common.files import write_text

COLUMNS = ("run", "subject", "workload", "cell", "round", "metric", "value", "unit")
MANIFEST, ROWS = "manifest.json", "rows.jsonl"
STOPPED = "STOPPED: "

Status = Literal["running", "finished", "stopped"]


class Manifest(BaseModel):
    """The conditions of a run. ``card`` and ``driver`` are the servers', ``host`` the client's machine.

    ``subjects``: facts about each subject, such as its command line, URL or settings. ``seconds``: wall time.
    ``status``: "stopped" after an error or an interruption; "running" also if the process was killed.
    """

    model_config = ConfigDict(extra="forbid")

    format: Literal[2] = 2
    run: str
    verb: str
    command: list[str]
    started: datetime
    seconds: float = 0.0
    status: Status = "running"
    commit: str | None = None
    card: str | None = None
    driver: str | None = None
    host: dict[str, str] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    settings: dict[str, Any] = Field(default_factory=dict)
    subjects: dict[str, dict[str, Any]] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)


class Run:
    """A run in progress: ``with Run.begin(store, "latency", settings={...}) as run: run.add(...)``."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._began = perf_counter() - manifest.seconds
        self._rows = os.open(folder / ROWS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._save()

    @classmethod
    def begin(
        cls,
        store: Path,
        verb: str,
        *,
        settings: Mapping[str, Any],
        card: str | None = None,
        local: bool = True,
        notes: Sequence[str] = (),
    ) -> Self:
        """Create the run's folder. ``card``: the GPU's name; by default this machine's GPU if the servers are
        ``local``. Raises BenchError if the store cannot be written."""
        started = datetime.now(UTC)
        found, driver = provenance.card() if local else (None, None)
        folder = _make_folder(store, f"{started:%Y-%m-%dT%H-%M-%S}-{verb}")
        return cls(
            folder,
            Manifest(
                run=folder.name,
                verb=verb,
                command=_command_line(),
                started=started,
                commit=provenance.commit(),
                card=card or found,
                driver=driver,
                host=provenance.host(),
                versions=provenance.versions(),
                settings=dict(settings),
                notes=list(notes),
            ),
        )

    @classmethod
    def resume(cls, folder: Path, keep: Callable[[Mapping[str, Any]], bool]) -> Self:
        """Continue an interrupted run, or extend one. Rows for which ``keep`` is false, such as those of an
        incomplete round, are dropped.

        Raises BenchError if the folder holds no run, or a broken one.
        """
        manifest = _read_manifest(folder)
        kept = "".join(json.dumps(row) + "\n" for row in _rows_of(folder) if keep(row))
        write_atomically(folder / ROWS, kept)
        manifest.status = "running"
        manifest.command = _command_line()
        manifest.notes = [note for note in manifest.notes if not note.startswith(STOPPED)]
        return cls(folder, manifest)

    def add(self, subject: str, workload: str, cell: str, round: int, values: Mapping[str, float]) -> None:
        """Record the values of one request, or of a whole cell, by metric (`METRICS`).

        Raises KeyError for an unknown metric, ValueError for a value that is not finite.
        """
        head = {"subject": subject, "workload": workload, "cell": cell, "round": round}
        lines = []
        for metric, value in values.items():
            if not math.isfinite(value):
                raise ValueError(f"{subject}, {workload}, {cell}: {metric} is {value}")
            lines.append(json.dumps({**head, "metric": metric, "value": value, "unit": METRICS[metric].unit}))
        if lines:
            _write_whole(self._rows, "".join(line + "\n" for line in lines).encode())

    def describe(self, subject: str, **about: Any) -> None:
        """Record facts about a subject; they are merged with earlier ones."""
        self.manifest.subjects[subject] = {**self.manifest.subjects.get(subject, {}), **about}
        self._save()

    def note(self, text: str) -> None:
        """Record a sentence that every table of the run shows, and print it on stderr."""
        print(f"note: {text}", file=sys.stderr, flush=True)
        self.manifest.notes.append(text)
        self._save()

    def close(self, status: Status = "finished") -> None:
        """End the run and write its manifest."""
        os.close(self._rows)
        self.manifest.status = status
        self._save()

    def results(self) -> "Results":
        """The run's rows so far."""
        return load([self.folder])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            why = str(error) if isinstance(error, Exception) else "interrupted"
            self.manifest.notes.append(f"{STOPPED}{why or type(error).__name__}")
        self.close("finished" if error is None else "stopped")
        files = {path.name: path.stat().st_size for path in self.folder.iterdir()}
        if error is not None and files.keys() == {MANIFEST, ROWS} and files[ROWS] == 0:
            shutil.rmtree(self.folder)  # the run has neither measurements nor logs

    def _save(self) -> None:
        self.manifest.seconds = perf_counter() - self._began
        write_atomically(self.folder / MANIFEST, self.manifest.model_dump_json(indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class Results:
    """The contents of a store. ``frame``: the rows, with `COLUMNS`; ``manifests``: by run, oldest first."""

    frame: pd.DataFrame
    manifests: dict[str, Manifest]

    def only(self, run: str) -> "Results":
        """The results of one run."""
        return Results(self.of(run=run), {run: self.manifests[run]})

    def of(self, **columns: str | Sequence[str]) -> pd.DataFrame:
        """The rows whose columns have these values: ``of(metric="latency", workload=["official"])``."""
        chosen = self.frame
        for name, wanted in columns.items():
            values = [wanted] if isinstance(wanted, str) else list(wanted)
            chosen = chosen[chosen[name].isin(values)]
        return chosen


def load(paths: Sequence[Path]) -> Results:
    """All runs in ``paths``: folders of runs, or folders that hold runs at any depth.

    Raises BenchError if there is no run, or if a manifest or a row is invalid. An incomplete last line, which
    a killed process leaves, is ignored.
    """
    folders = list(dict.fromkeys(folder.resolve() for path in paths for folder in _runs_in(path)))
    found = {folder: _read_manifest(folder) for folder in folders}
    manifests = dict(sorted(((m.run, m) for m in found.values()), key=lambda one: (one[1].started, one[0])))
    if len(manifests) < len(found):
        raise BenchError(f"two runs in {', '.join(map(str, paths))} have one name: leave a copy out")
    rows = [{"run": manifest.run, **row} for folder, manifest in found.items() for row in _rows_of(folder)]
    frame = pd.DataFrame(rows, columns=list(COLUMNS)).astype({"round": "int64", "value": "float64"})
    return Results(frame, manifests)


def manifests(store: Path) -> dict[Path, Manifest]:
    """The manifest of each run in a store, by folder, oldest first; empty if the store does not exist. Raises
    BenchError for an invalid manifest."""
    found = {path.parent: _read_manifest(path.parent) for path in store.rglob(MANIFEST)}
    return dict(sorted(found.items(), key=lambda one: (one[1].started, one[1].run)))


def _command_line() -> list[str]:
    """This process's command line, with the API key masked."""
    words = sys.argv[1:]
    for number, word in enumerate(words):
        if word == "--api-key" and number + 1 < len(words):
            words[number + 1] = "***"
        elif word.startswith("--api-key="):
            words[number] = "--api-key=***"
    return ["qwen-bench", *words]


def write_atomically(path: Path, text: str) -> None:
    """Write a file under a temporary name, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)


def _make_folder(store: Path, name: str) -> Path:
    for number in range(1, 1000):
        folder = store / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise BenchError(f"--out {store}: cannot be written: {error.strerror}") from error
        return folder
    raise BenchError(f"--out {store}: too many runs of one second")


def _write_whole(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _runs_in(path: Path) -> list[Path]:
    folders = sorted(manifest.parent for manifest in path.rglob(MANIFEST))
    if not folders:
        raise BenchError(f"{path}: no run there: want a folder that a command wrote with --out")
    return folders


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise BenchError(f"{path}: not a manifest: {first_problem(error, 'the document')}") from error


def _rows_of(folder: Path) -> Iterator[dict[str, Any]]:
    path = folder / ROWS
    if not path.is_file():
        return
    *lines, rest = path.read_text(encoding="utf-8").split("\n")
    del rest  # empty, or an incomplete line
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            yield {name: row[name] for name in COLUMNS if name != "run"}
        except (ValueError, KeyError, TypeError) as error:
            raise BenchError(f"{path}, line {number}: not a row: {error!r}") from error
