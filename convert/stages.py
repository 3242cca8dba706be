"""Finished work on disk: what each output file was made from, and how it comes into being unharmed.

An output appears under its final name only when it is complete; until then it is `<name>.part`. What it was
made from is a fingerprint, kept in one JSON file beside the outputs. A rerun skips an output whose
fingerprint, size and modification time are those on record, and makes again whatever is missing, changed or
out of date.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

PART = ".part"

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary name beside `path`; renames it to `path` on success, removes it on any exception.

    Raises OSError that names `path` where there is no room for it; Python's own says no more than that.
    """
    part = path.with_name(path.name + PART)
    part.unlink(missing_ok=True)
    try:
        yield part
        part.replace(path)
    except OSError as error:
        if error.filename is None and error.errno in NO_ROOM:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path`, waiting for it; the kernel drops it should the process die."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
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


class StageRecord:
    """Which outputs in a folder are finished, and what from: `<folder>/<name>.stages.json`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[str, dict[str, Any]] = {}
        try:
            loaded = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return  # no record means that nothing is known to be finished
        if isinstance(loaded, dict):
            self._entries = {k: v for k, v in loaded.items() if isinstance(v, dict)}

    def forget(self) -> None:
        """Counts nothing as finished any more."""
        self._entries.clear()

    def is_finished(self, output: Path, fingerprint: str) -> bool:
        """Whether `output` stands as it was made, from what `fingerprint` stands for."""
        entry = self._entries.get(output.name)
        if entry is None or entry.get("fingerprint") != fingerprint or not output.is_file():
            return False
        stat = output.stat()
        return bool(entry.get("bytes") == stat.st_size and entry.get("mtime_ns") == stat.st_mtime_ns)

    def finish(self, output: Path, fingerprint: str) -> None:
        """Puts the complete `output` on record."""
        stat = output.stat()
        self._entries[output.name] = {
            "fingerprint": fingerprint,
            "bytes": stat.st_size,
            "mtime_ns": stat.st_mtime_ns,
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        with replacing(self._path) as part:
            part.write_text(json.dumps(self._entries, indent=2) + "\n", encoding="utf-8")
