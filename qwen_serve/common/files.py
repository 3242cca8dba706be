"""Writes files that are complete or absent, and opens only regular files."""

import errno
import fcntl
import glob
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

PART = ".part"
"""Suffix of a folder that has a file until the file is complete."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def replacing(path: Path, *, sync: bool = False) -> Iterator[Path]:
    """Yields a path to write to. At the end that file replaces `path`; after an exception nothing changes.

    The file has the name of `path`, and is in a new folder next to it that only this user can write to. So
    nobody can redirect the writer with a symbolic link. With `sync` the content is on the disk before the
    file gets its final name. Files that a killed process left behind are removed first.

    Raises OSError, which names `path`, also if that is a folder, a pipe or a device.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    part: Path | None = None
    try:
        _sweep(path)
        with TemporaryDirectory(prefix=f".{path.name}.", suffix=PART, dir=path.parent) as folder:
            part = Path(folder, path.name)
            with _locked(Path(folder)):
                yield part
                if sync:
                    with part.open("rb") as file:
                        os.fsync(file.fileno())
                part.replace(path)
    except OSError as error:
        unnamed = error.filename is None and error.errno in NO_ROOM
        if unnamed or part is None or error.filename in (str(part), str(part.parent)):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def write_text(path: Path, text: str) -> None:
    """Writes a file as UTF-8, completely or not at all. Raises OSError."""
    with replacing(path, sync=True) as part:
        part.write_text(text, encoding="utf-8")


def open_regular(path: Path) -> int:
    """A file descriptor to read from. Raises OSError, also if `path` is a folder, or a pipe or device, whose
    reader could wait for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is no regular file", str(path))


def _sweep(path: Path) -> None:
    """Remove what dead writers of `path` left behind: folders on which nobody holds a lock."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*{PART}"):
        with suppress(OSError), _locked(left) as free:
            if free:
                shutil.rmtree(left)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Take a folder's lock, which the kernel releases when this process dies. Yields whether it was free."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except OSError:  # somebody holds it, or the file system has no locks
            free = False
        yield free
    finally:
        os.close(descriptor)
