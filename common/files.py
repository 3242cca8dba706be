"""Files that appear whole or not at all, and files that are no pipe or device."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import shutil
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PART = ".part"
"""What the name of a folder ends in that holds a file until it is complete."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def replacing(path: Path, *, sync: bool = False) -> Iterator[Path]:
    """Yields a name to write to; what is there at the end takes the place of `path`, or on an exception
    nothing.

    The name is that of `path`, in a new folder beside it that only this user can write to: whoever writes by
    name follows no link that somebody planted. With `sync` the content is on the disk before it gets its
    name. What a process left behind that was killed is removed first.

    Raises OSError, which names `path`, also where that is a folder, a pipe or a device.
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
    """Writes a file as UTF-8, whole or not at all. Raises OSError."""
    with replacing(path, sync=True) as part:
        part.write_text(text, encoding="utf-8")


def open_regular(path: Path) -> int:
    """A descriptor to read from. Raises OSError, also where `path` is a folder, or a pipe or device, which
    could keep its reader waiting for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is no regular file", str(path))


def _sweep(path: Path) -> None:
    """Remove what writers of `path` left that are no more: the kernel has dropped their locks."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*{PART}"):
        with suppress(OSError), _locked(left) as free:
            if free:
                shutil.rmtree(left)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold a folder's lock as long as this process lives; whether it was free."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except OSError:  # held, or a file system without locks
            free = False
        yield free
    finally:
        os.close(descriptor)
