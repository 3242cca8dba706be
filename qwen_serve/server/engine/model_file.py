"""Fingerprints of model files: a digest of all their bytes, computed once for each state of a file.

Data that outlive a process (states of the prefix cache, measured times, sizes of buffers) are stored under
the fingerprint of the loaded file. A file that gets the same name later does not change it.
"""

import hashlib
import logging
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ValidationError

from qwen_serve.common.files import open_regular, write_text
from qwen_serve.llamacpp.errors import ModelLoadError
from qwen_serve.server.about import cache_folder

log = logging.getLogger(__name__)

PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
"""End of the name of one of several files of a model, by which llama.cpp finds the others."""

BLOCK = 2**23
"""Bytes of a block; blocks are hashed on several threads."""

SETTLED_NS = 2 * 10**9
"""Within this time after a write, another write may leave the same time stamp."""


@dataclass(frozen=True)
class ModelFile:
    """A file in one state, identified by `os.stat`; times are in ns."""

    path: Path
    inode: int
    size: int
    modified: int
    changed: int

    @classmethod
    def of(cls, path: Path, status: os.stat_result) -> Self:
        return cls(path, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def fingerprint(self) -> str:
        """A digest of the whole file. Raises ModelLoadError if the file is no longer in this state and its
        digest is not cached."""
        return _fingerprint(self)

    def confirm(self) -> None:
        """Call this after loading the file by name. Raises ModelLoadError if it may have been another
        file."""
        mine, now = self.fingerprint(), _now(self.path)
        if now != self and (now is None or now.fingerprint() != mine):
            raise _other(self.path)

    @property
    def is_checked(self) -> bool:
        """Whether a file of these bytes was loaded before, and all its weights were finite. Never so for a
        part of a model, which says nothing of the others."""
        return not PART.search(self.path.name) and self._mark.is_file()

    def note_checked(self) -> None:
        """Record that its weights are finite, for later starts; a failure is logged."""
        try:
            self._mark.parent.mkdir(parents=True, exist_ok=True)
            self._mark.touch()
        except OSError as error:
            log.debug("%s is not written: %s", self._mark, error)

    @property
    def _mark(self) -> Path:
        name = hashlib.sha256(self.fingerprint().encode()).hexdigest()[:32]
        return cache_folder() / "checked" / name

    @property
    def overwritten(self) -> bool:
        """Whether its bytes were changed in place. With `use_mmap` the model then uses the changed bytes."""
        now = _now(self.path)
        if now is None or now.inode != self.inode:
            return False
        return (now.size, now.modified) != (self.size, self.modified)


class Known(BaseModel):
    """A fingerprint's record in the cache folder."""

    state: tuple[Path, int, int, int, int]
    fingerprint: str


def _now(path: Path) -> ModelFile | None:
    try:
        return ModelFile.of(path, path.stat())
    except OSError:
        return None


def _other(path: Path) -> ModelLoadError:
    return ModelLoadError(f"{path} was changed or replaced while it was loaded; start again")


@lru_cache(8)
def _fingerprint(model: ModelFile) -> str:
    state = (model.path.absolute(), *astuple(model)[1:])
    name = hashlib.sha256(os.fsencode(state[0])).hexdigest()[:32]
    record = cache_folder() / "fingerprints" / f"{name}.json"
    try:
        known = Known.model_validate_json(record.read_bytes())
        if known.state == state:
            return known.fingerprint
    except FileNotFoundError:
        pass
    except (OSError, ValidationError) as error:
        log.warning("%s: %s; the model is read again", record, error)
    found = _digest(model)
    if time.time_ns() - max(model.modified, model.changed) > SETTLED_NS:
        try:
            record.parent.mkdir(parents=True, exist_ok=True)
            write_text(record, Known(state=state, fingerprint=found).model_dump_json())
        except OSError as error:
            log.debug("%s is not written: %s", record, error)
    return found


def _digest(model: ModelFile) -> str:
    """Its size, and a hash of the hashes of its blocks."""
    started = time.perf_counter()
    try:
        descriptor = open_regular(model.path)
    except OSError as error:
        raise ModelLoadError(f"{model.path} cannot be read: {error.strerror or error}") from error
    try:
        hashes = hashlib.sha256()
        if ModelFile.of(model.path, os.fstat(descriptor)) == model:
            with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
                for one in threads.map(partial(_hash, descriptor), range(0, model.size, BLOCK)):
                    hashes.update(one)
        if ModelFile.of(model.path, os.fstat(descriptor)) != model:
            raise _other(model.path)
    except OSError as error:
        raise ModelLoadError(f"{model.path} cannot be read: {error.strerror or error}") from error
    finally:
        os.close(descriptor)
    if (seconds := time.perf_counter() - started) > 1:
        log.info("%s was read once in %.1f s, to recognize it later", model.path, seconds)
    return f"{model.size} bytes, {hashes.hexdigest()}"


def _hash(descriptor: int, start: int) -> bytes:
    return hashlib.sha256(os.pread(descriptor, BLOCK, start)).digest()
