"""Downloads files from the Hugging Face hub into the hub's own cache.

Downloads resume. Files are checked by sha256 when they were fetched, and when a process first uses them.

huggingface_hub itself downloads an interrupted file from its beginning (2.4 removes the part), and compares
only sizes.
"""

import fcntl
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.hf_api import ModelInfo, RepoSibling
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # a lazy import

SHA256 = re.compile(r"[0-9a-f]{64}")

_intact: set[Path] = set()
"""Blobs that this process has checked."""


class DownloadError(Exception):
    """A file cannot be downloaded; the message says why."""


def repo_folder(repo: str) -> Path:
    """A repository's folder in the hub's cache."""
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")


def fetch_blobs(info: ModelInfo, files: Iterable[RepoSibling]) -> None:
    """Downloads the contents of a model's large `files` under the names of the hub client, which finds them
    there. `info` has the metadata of files.

    The client itself downloads files in git, which are small and have no sha256, and files that only Xet
    serves.

    Raises:
        DownloadError: the disk has too little room, or a file differs from the hub's.
    """
    blobs = repo_folder(info.id) / "blobs"
    missing: dict[Path, RepoSibling] = {}
    for file in files:
        if file.lfs is None or is_intact(blob := blobs / file.lfs.sha256):
            continue
        found = try_to_load_from_cache(info.id, file.rfilename, revision=info.sha)
        if not (isinstance(found, str) and is_intact(Path(found))):
            missing[blob] = file
    blobs.parent.mkdir(parents=True, exist_ok=True)
    _check_room(blobs.parent, missing)
    blobs.mkdir(exist_ok=True)
    for blob, file in missing.items():
        if file.lfs is not None and file.lfs.size < constants.MAX_HTTP_DOWNLOAD_SIZE:
            url = hf_hub_url(info.id, file.rfilename, revision=info.sha)
            _download(url, blob, file.lfs.size, file.rfilename)


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_intact(path: Path) -> bool:
    """Whether a file of the cache has the bytes that were fetched, by the sha256 in its blob's name.

    A blob is read for that when a process first asks. One that has other bytes is removed. Files without a
    sha256 are small ones of git, and taken as they are.

    Raises DownloadError for a blob that is a folder.
    """
    blob = path.resolve()
    if blob in _intact or not SHA256.fullmatch(blob.name):
        return blob.is_file()
    if not blob.is_file():
        if blob.exists():
            raise DownloadError(f"{blob}: is no file; remove it, and the same command fetches it")
        return False
    with blob.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() == blob.name:
            _intact.add(blob)
            return True
    print(f"{blob}: has other bytes than were fetched; it is removed", file=sys.stderr)
    blob.unlink(missing_ok=True)
    return False


def _download(url: str, blob: Path, n_bytes: int, name: str) -> None:
    """Fetches a blob, unless another process does. Only the holder of the lock on the file that has the
    part's name writes to it, renames or removes it. A process that waited may hold one that is gone."""
    part = _part(blob)
    while True:
        with part.open("ab+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"{name}: another process is fetching it; waiting for it", file=sys.stderr)
                fcntl.flock(file, fcntl.LOCK_EX)
            if blob.exists():
                if _is_at(file, part):
                    part.unlink()  # made by the opening above
                return
            if not _is_at(file, part):
                continue
            _fetch(url, file, n_bytes, name)
            file.flush()
            file.seek(0)
            if not _is_at(file, part):  # something else than this program removed it
                continue
            if (digest := hashlib.file_digest(file, "sha256").hexdigest()) != blob.name:
                part.unlink()
                raise DownloadError(
                    f"{name}: what came has the sha256 {digest}, the hub's is {blob.name}; it was removed, "
                    "the same command fetches it again"
                )
            part.replace(blob)
            _intact.add(blob.resolve())
            return


def _fetch(url: str, file: BinaryIO, n_bytes: int, name: str) -> None:
    if (there := file.seek(0, os.SEEK_END)) > n_bytes:
        there = file.truncate(0)
    if there:
        print(f"{name}: {there:,} of {n_bytes:,} bytes are there; the rest is fetched", file=sys.stderr)
    http_get(
        url,
        file,
        resume_size=there,
        headers=build_hf_headers(),
        expected_size=n_bytes,
        displayed_filename=PurePosixPath(name).name,
    )


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether `path` names this open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _part(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _check_room(folder: Path, missing: dict[Path, RepoSibling]) -> None:
    n_bytes = sum(
        (file.size or 0) - (part.stat().st_size if (part := _part(blob)).exists() else 0)
        for blob, file in missing.items()
    )
    if n_bytes > (free := shutil.disk_usage(folder).free):
        raise DownloadError(
            f"{n_bytes / 1e9:,.1f} GB to download, {free / 1e9:,.1f} GB free under "
            f"{constants.HF_HUB_CACHE}; make room, or point HF_HOME to a larger disk"
        )
