"""Records finished outputs and their inputs, and writes outputs atomically.

An output gets its final name only when it is complete. Until then it is in a folder `.<name>.*.part` next to
it. A fingerprint identifies its inputs; a JSON file next to the outputs has all fingerprints. A rerun skips
an output if its fingerprint, size and modification time match the record. It makes missing or outdated
outputs again, and does not touch unknown files.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_serve.common import files
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.progress import size
from qwen_serve.llamacpp.errors import LlamaError

MMPROJ = "mmproj-"
"""llama.cpp's prefix for the file of a model's vision tower."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """`common.files.replacing`, with errors that name `path` rather than the temporary file."""
    with files.replacing(path) as part:
        try:
            yield part
        except (ConvertError, LlamaError) as error:
            error.args = tuple(str(arg).replace(str(part), str(path)) for arg in error.args)
            raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path`, waiting for it; the kernel releases it if the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o666), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another conversion is writing to {path.parent}; waiting for it", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fingerprint(parts: Mapping[str, Any]) -> str:
    """A short digest of everything an output depends on; `parts` must be plain JSON data."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stamp(path: Path) -> tuple[int, int]:
    """Size in bytes and modification time, which renaming keeps."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


@dataclass(frozen=True)
class Output:
    """A planned file, and the fingerprint of all its inputs."""

    path: Path
    fingerprint: str


class StageRecord:
    """The finished outputs of a folder and their inputs: `<folder>/<name>.stages.json`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._force = False
        self._settled: set[Path] = set()  # outputs made or found finished in this run
        self._entries: dict[str, dict[str, Any]] = {}
        try:
            loaded = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return  # without a record nothing counts as finished
        if isinstance(loaded, dict):
            self._entries = {k: v for k, v in loaded.items() if isinstance(v, dict)}

    @classmethod
    @contextmanager
    def locked(cls, folder: Path, name: str, *, force: bool) -> Iterator[StageRecord]:
        """The record of `name` in `folder`, locked; with `force` nothing counts as finished."""
        with locked(folder / ".convert.lock"):
            for prefix in ("", MMPROJ):
                for stale in folder.glob(f".{prefix}{glob.escape(name)}[-.]*{files.PART}"):
                    shutil.rmtree(stale, ignore_errors=True)  # of a killed run
            record = cls(folder / f"{name}.stages.json")
            record._force = force
            yield record

    def is_finished(self, output: Output) -> bool:
        """Whether the file exists unchanged and was made from the inputs of this fingerprint."""
        entry = self._entries.get(output.path.name, {})
        if entry.get("fingerprint") != output.fingerprint or (
            self._force and output.path not in self._settled
        ):
            return False
        return output.path.is_file() and _stamp(output.path) == (entry.get("bytes"), entry.get("mtime_ns"))

    def check_own(self, path: Path) -> None:
        """Raises ConvertError: there is a file at `path` that is not in this record, and no --force."""
        if self._force or not path.exists():
            return
        entry = self._entries.get(path.name, {})
        known = [(entry.get("bytes"), entry.get("mtime_ns")), tuple(entry.get("replaced", ()))]
        if _stamp(path) not in known:
            raise ConvertError(
                f"{path}: is there, and was not made by this command or was changed since; it would be "
                "overwritten: give another --out or --name, or --force"
            )

    def made_from(self, path: Path) -> str | None:
        """The fingerprint of an unchanged file that was made here; None for any other."""
        entry = self._entries.get(path.name, {})
        known = Output(path, str(entry.get("fingerprint")))
        here = path.resolve().parent == self._path.resolve().parent
        return known.fingerprint if here and self.is_finished(known) else None

    def make(self, output: Output, write: Callable[[Path], object]) -> Output:
        """Writes a file under a temporary name, unless it is finished."""
        if output.path in self._settled:
            return output
        if self.is_finished(output):
            print(f"{output.path}: already there", file=sys.stderr)
        else:
            self.check_own(output.path)
            start = time.monotonic()
            with replacing(output.path) as part:
                write(part)
                self._finish(output, part, time.monotonic() - start)
        self._settled.add(output.path)
        return output

    def check(self, what: str, made_from: str, check: Callable[[], object]) -> None:
        """Runs a check, unless the same one has passed before."""
        if self._entries.get(what, {}).get("fingerprint") != made_from:
            check()
            self._entries[what] = {"fingerprint": made_from}
            self._save()

    def seconds(self, outputs: Iterable[Output]) -> float:
        """Seconds that these outputs took, whether made or found finished in this run."""
        names = [output.path.name for output in outputs if output.path in self._settled]
        return sum(float(self._entries[name].get("seconds", 0.0)) for name in names)

    def _finish(self, output: Output, part: Path, seconds: float) -> None:
        """Records a complete file that is about to be renamed, and the seconds it took."""
        n_bytes, mtime_ns = _stamp(part)
        self._entries[output.path.name] = {
            "fingerprint": output.fingerprint,
            "bytes": n_bytes,
            "mtime_ns": mtime_ns,
            # still recognized if this process is killed before the renaming
            "replaced": _stamp(output.path) if output.path.exists() else (),
            "seconds": round(seconds, 3),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        self._save()

    def _save(self) -> None:
        with replacing(self._path) as part:
            part.write_text(json.dumps(self._entries, indent=2) + "\n", encoding="utf-8")

    def check_room(self, estimates: Iterable[tuple[Output, int]], beside: Iterable[Path] = ()) -> None:
        """Adds up the bytes of outputs still to be written. Of the small files `beside` them it only checks
        that they were written here.

        Raises:
            ConvertError: the folder's file system has less room, or an unknown file is in the way.
        """
        folder, estimates = self._path.parent, list(estimates)
        for output, _ in estimates:
            if not self.is_finished(output):
                self.check_own(output.path)
        for path in beside:
            self.check_own(path)
        needed = sum(n_bytes for output, n_bytes in estimates if not self.is_finished(output))
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise ConvertError(
                f"--out {folder}: about {size(needed)} will be written, {size(free)} are free; "
                "make room, choose another --out, or fewer quants at a time"
            )
