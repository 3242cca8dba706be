"""Checkpoints on disk, so that they survive a restart: a zip of NumPy arrays with a JSON header.

Layout: `about.json` ({"format", "made_by", "salts"}), then for entry n `n/tokens.npy` (int32, [length]) and
`n/state.npy` (uint8, [bytes], from llama.cpp's `llama_state_seq_get_data`), the most recently used first. A
zip has a checksum for each member, so a damaged file is detected. Drafters' parts of a state are not in it.
"""

import json
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_serve.common.files import open_regular, replacing

FORMAT = 1

MAX_ABOUT = 2**24
"""Most bytes of the JSON header: some hundred for each entry, of which there are a few hundred."""

NOT_OURS = (
    *(zipfile.BadZipFile, ValueError, KeyError, TypeError, AttributeError, EOFError),
    *(RecursionError, NotImplementedError, RuntimeError, zlib.error, struct.error, MemoryError),
    *(SyntaxError, tokenize.TokenError),
)
"""What reading any bytes may raise: a zip may ask for another compression or a password, and NumPy reads a
header as a Python expression."""


class PrefixFileError(Exception):
    """The file cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint: its `tokens` [length], shared only by requests with its `salt`, and llama.cpp's `state`
    [bytes]."""

    salt: str
    tokens: npt.NDArray[np.int32]
    state: npt.NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.state.nbytes


@dataclass
class Counted:
    """Number and size of entries that were written or read."""

    entries: int = 0
    longest: int = 0
    """Tokens of the longest one."""
    size: int = 0
    """Bytes of all of them."""
    damage: str = ""
    """Why entries behind these could not be read; empty if all were."""

    def add(self, entry: Entry) -> None:
        self.entries += 1
        self.longest = max(self.longest, len(entry.tokens))
        self.size += entry.nbytes


class PrefixFile:
    """Reads and writes the file at `path`. `made_by`: what a state depends on (model, build, settings)."""

    def __init__(self, path: Path, made_by: Mapping[str, Any]) -> None:
        self.path = path
        self._made_by = json.loads(json.dumps(made_by))

    def write(self, entries: Iterable[Entry], max_bytes: int) -> Counted:
        """Replace the file by entries of at most `max_bytes` in all, written under a temporary name first.

        Entries that no longer fit are left out and not counted. Raises OSError.
        """
        salts: list[str] = []
        written = Counted()
        with replacing(self.path, sync=True) as part:
            # readable by the owner only, since it holds users' prompts
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w+b") as file, zipfile.ZipFile(file, "w") as archive:
                for entry in entries:
                    if written.size + entry.nbytes > max_bytes:
                        continue
                    _put(archive, f"{len(salts)}/tokens.npy", entry.tokens)
                    _put(archive, f"{len(salts)}/state.npy", entry.state)
                    salts.append(entry.salt)
                    written.add(entry)
                about = {"format": FORMAT, "made_by": self._made_by, "salts": salts}
                archive.writestr("about.json", json.dumps(about))
        return written

    def read(self) -> Iterator[Entry]:
        """Yield the entries one at a time, each once it is known to be whole. Raises PrefixFileError, also if
        `made_by` differs."""
        try:
            with os.fdopen(open_regular(self.path), "rb") as file, zipfile.ZipFile(file) as archive:
                about = _about(archive)
                if about["format"] != FORMAT:
                    raise PrefixFileError(f"its format is {about['format']}, this server's is {FORMAT}")
                if different := sorted(
                    name
                    for name in {*self._made_by, *about["made_by"]}
                    if self._made_by.get(name) != about["made_by"].get(name)
                ):
                    raise PrefixFileError(f"it was made with another {', '.join(different)}")
                for number, salt in enumerate(about["salts"]):
                    tokens = _get(archive, f"{number}/tokens.npy", np.int32)
                    state = _get(archive, f"{number}/state.npy", np.uint8)
                    if not len(tokens):
                        raise PrefixFileError(f"entry {number} is no checkpoint")
                    yield Entry(str(salt), tokens, state)
        except OSError as error:
            raise PrefixFileError(f"it cannot be read: {error.strerror or error}") from error
        except NOT_OURS as error:
            raise PrefixFileError(f"it is damaged, or no file of checkpoints: {error}") from error


def _about(archive: zipfile.ZipFile) -> Any:
    info = archive.getinfo("about.json")
    if info.file_size > MAX_ABOUT:
        raise ValueError(f"about.json has {info.file_size:,} bytes; at most {MAX_ABOUT:,} are read")
    return json.loads(archive.read(info))


def _put(archive: zipfile.ZipFile, name: str, array: npt.NDArray[Any]) -> None:
    with archive.open(name, "w", force_zip64=True) as member:
        np.lib.format.write_array(member, array, allow_pickle=False)


def _get(archive: zipfile.ZipFile, name: str, kind: type[np.generic]) -> npt.NDArray[Any]:
    """A member, which has one dimension. Its header is held against its bytes in the file before memory is
    allocated for it, so that no header asks for more than the file has."""
    info = archive.getinfo(name)
    with archive.open(info) as member:
        version = np.lib.format.read_magic(member)
        if info.compress_type != zipfile.ZIP_STORED or version != (1, 0):
            raise ValueError(f"{name} was not written by this server")
        shape, _, dtype = np.lib.format.read_array_header_1_0(member)
        n_bytes = info.file_size - member.tell()
        if dtype != kind or len(shape) != 1 or shape[0] * dtype.itemsize != n_bytes:
            raise ValueError(f"{name} is {dtype} {shape} in {n_bytes:,} bytes")
        array = np.empty(shape, dtype)
        left = array.data.cast("B")
        while left and (n := member.readinto(left)):  # type: ignore[attr-defined]  # io.BufferedIOBase's
            left = left[n:]
        if left or member.read(1):  # at its end the checksum is compared
            raise EOFError(f"{name} ends early")
        return array
