"""The records on disk: a JSON file each, written once, never again."""

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from bench.errors import BenchError
from bench.history_record import Experiment, digest

FOLDER = Path(__file__).resolve().parent / "results" / "history"
SCHEMA = "schema.json"


def load(folder: Path) -> dict[str, Experiment]:
    """Every record by name, oldest first.

    Raises:
        BenchError: a file that is no record, or has another name than its record.
    """
    if not folder.is_dir():
        raise BenchError(f"{folder}: no such folder; `add` makes it with the first record")
    found = [_read(path) for path in sorted(folder.glob("*.json")) if path.name != SCHEMA]
    return {record.name: record for record in sorted(found, key=lambda record: (record.date, record.name))}


def check(folder: Path) -> dict[str, Experiment]:
    """Loads every record and checks them against each other and against the files that they cite.

    Raises:
        BenchError: a parent that is missing, younger, or changed since; a figure that is not in its source.
    """
    records = load(folder)
    for record in records.values():
        _check_one(record, records, folder)
    return records


def append(folder: Path, record: Experiment) -> Path:
    """Adds one record; the file is complete or not there, and no earlier one is touched.

    Writers in several processes take turns. Raises:
        BenchError: the name is taken, or what `check` finds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record.name}.json"
    if path.name == SCHEMA:
        raise BenchError(f"{record.name}: this name is the schema's; choose another")
    with _turn(folder):
        records = load(folder)
        if record.name in records:
            raise BenchError(f"{path}: already on record; records are never rewritten, choose another name")
        _check_one(record, records, folder)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            part.write_text(record.to_json(), encoding="utf-8")
            os.link(part, path)  # unlike a rename, never over a file that is there
        finally:
            part.unlink(missing_ok=True)
    return path


def parent_digest(folder: Path, name: str) -> str:
    """The digest by which a child refers to record ``name``. Raises BenchError if it is not on record."""
    path = folder / f"{name}.json"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in folder.glob("*.json") if p.name != SCHEMA)) or "none yet"
        raise BenchError(f"--parent {name}: not on record; there are {known}")
    return digest(path.read_text(encoding="utf-8"))


def lineage(records: Mapping[str, Experiment], name: str) -> Sequence[Experiment]:
    """A record's ancestors from the first on, and itself. Raises BenchError if one is not on record."""
    chain: list[Experiment] = []
    wanted: str | None = name
    while wanted is not None:
        if wanted not in records:
            raise BenchError(f"{wanted}: not on record; there are {', '.join(records) or 'none yet'}")
        chain.append(records[wanted])
        wanted = chain[-1].parent
    return chain[::-1]


def _check_one(record: Experiment, records: Mapping[str, Experiment], folder: Path) -> None:
    where = folder / f"{record.name}.json"
    if record.parent is not None:
        parent = records.get(record.parent)
        if parent is None or parent is record:
            raise BenchError(f"{where}: parent: {record.parent} is not on record")
        if parent.date > record.date:
            raise BenchError(
                f"{where}: date: {record.date.isoformat()} is before its parent's, {parent.date.isoformat()}"
            )
        if parent_digest(folder, record.parent) != record.parent_digest:
            raise BenchError(
                f"{where}: parent_digest: {record.parent} is not what it was when this was added; "
                "records are never changed, restore it"
            )
    for name, figure in record.figures.items():
        try:
            figure.check(folder)
        except BenchError as error:
            raise BenchError(f"{where}: figures.{name}: {error}") from error


def _read(path: Path) -> Experiment:
    try:
        record = Experiment.model_validate_json(path.read_bytes())
    except OSError as error:
        raise BenchError(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the document"
        raise BenchError(f"{path}: not a record: {field}: {first['msg']}") from error
    if record.name != path.stem:
        raise BenchError(f"{path}: name: {record.name!r} must be the file's own, {path.stem!r}")
    return record


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Holds the folder's lock; the kernel drops it should the process die."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
