"""Fetches GGUFs from the Hugging Face hub once, into the hub's own cache.

`hf:owner/repo:Q4_K_M` is a repository and a quant, as in its files' names. Cached files are served without
the network. An interrupted download resumes, and a file gets its name in the cache only if its sha256 is the
hub's: huggingface_hub starts again in each process, and compares only sizes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if not sys.stderr.isatty():
    os.environ.setdefault("TQDM_MININTERVAL", "10")  # at most one line in ten seconds in a log

from huggingface_hub import HfApi, constants, hf_hub_download, hf_hub_url
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # a lazy import

from qwen_serve.server.hub_files import (
    DEFAULT_QUANT,
    HubError,
    choose,
    files_below,
    models_of,
    named,
    snapshots_of,
    tower_beside,
    tower_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from huggingface_hub.hf_api import ModelInfo, RepoSibling


def fetch(repo: str, quant: str | None, *, vision: bool) -> Path:
    """The model of a repository (owner/name), from the cache or else the hub; of a split model the first
    part. With `vision` the vision tower is fetched too, if the hub has one.

    `quant`: as in the files' names, or a file's name; None for Q4_K_M, or for the only one.

    Raises:
        HubError: no such repository or quant, access refused, hub unreachable, no disk space, or a
            file that differs from the hub's.
    """
    cached = _cached(repo, quant or DEFAULT_QUANT)
    if cached is not None and (tower_beside(cached) or not vision):
        return cached
    try:
        info = HfApi().model_info(repo, files_metadata=True)
    except Exception as error:  # the installed hub client may use any HTTP library
        if (found := cached or (None if quant else _cached(repo, None))) is not None:
            return found
        raise HubError(f"hf:{repo}: {_refusal(error)}") from None
    siblings = {file.rfilename: file for file in info.siblings or []}
    files = choose(repo, quant, siblings).files if cached is None else ()
    tower = tower_of(siblings) if vision else None
    # the tower first: once the model is complete, everything is
    wanted = [siblings[name] for name in (*([tower] if tower else []), *files)]
    try:
        _check_room(repo, wanted)
        paths = [_download(repo, info, file) for file in wanted]
    except HubError:
        raise
    except Exception as error:
        raise HubError(
            f"hf:{repo}: could not be fetched: {_first_line(error)}; the same command goes on from there"
        ) from None
    return cached or paths[-len(files)]


def repo_folder(repo: str) -> Path:
    """A repository's folder in the hub's cache."""
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")


def _cached(repo: str, quant: str | None) -> Path | None:
    """The model of that quant, or the only model, in the newest snapshot that has exactly one; a split
    model's first part."""
    for snapshot in snapshots_of(repo_folder(repo)):
        models = models_of(files_below(snapshot))
        found = models if quant is None else named(models, quant)
        if len(found) == 1:
            return snapshot / found[0].files[0]
    return None


def _download(repo: str, info: ModelInfo, file: RepoSibling) -> Path:
    """Downloads a file into the cache, under the hub client's name for it; returns its path there."""
    # files in git itself are small and have no sha256; larger ones are fetched by Xet, which verifies them
    if file.lfs is not None and file.lfs.size < constants.MAX_HTTP_DOWNLOAD_SIZE:
        blob = repo_folder(repo) / "blobs" / file.lfs.sha256
        if not blob.exists():
            blob.parent.mkdir(parents=True, exist_ok=True)
            url = hf_hub_url(repo, file.rfilename, revision=info.sha)
            _download_blob(url, blob, file.lfs.size, f"hf:{repo}: {file.rfilename}")
    return Path(hf_hub_download(repo, file.rfilename))


def _download_blob(url: str, blob: Path, n_bytes: int, what: str) -> None:
    part = blob.with_name(f"{blob.name}.incomplete")
    with part.open("ab+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{what}: another process is fetching it; waiting for it", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        if blob.exists():
            return
        if file.seek(0, os.SEEK_END) > n_bytes:
            file.truncate(0)
        name = PurePosixPath(what).name
        http_get(
            url,
            file,
            resume_size=file.tell(),
            headers=build_hf_headers(),
            expected_size=n_bytes,
            displayed_filename=name,
        )
        file.flush()
        file.seek(0)
        if (digest := hashlib.file_digest(file, "sha256").hexdigest()) != blob.name:
            part.unlink()
            raise HubError(
                f"{what}: what came has the sha256 {digest}, the hub's is {blob.name}; it was removed, the "
                "same command fetches it again"
            )
        part.replace(blob)


def _check_room(repo: str, files: Iterable[RepoSibling]) -> None:
    """Raises HubError if the disk has too little room for the rest of the download."""
    folder = repo_folder(repo)
    folder.mkdir(parents=True, exist_ok=True)
    missing = 0
    for file in files:
        blob = folder / "blobs" / (file.lfs.sha256 if file.lfs else "")
        if file.lfs and not blob.exists():
            part = blob.with_name(f"{blob.name}.incomplete")
            missing += (file.size or 0) - (part.stat().st_size if part.exists() else 0)
    if missing > (free := shutil.disk_usage(folder).free):
        raise HubError(
            f"hf:{repo}: {missing / 1e9:,.1f} GB to download, {free / 1e9:,.1f} GB free under "
            f"{constants.HF_HUB_CACHE}; make room, or point HF_HOME to a larger disk"
        )


def _refusal(error: Exception) -> str:
    if isinstance(error, GatedRepoError):
        return "access is gated; accept its terms on the hub and set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return "the hub knows no such model (private? set HF_TOKEN)"
    if constants.HF_HUB_OFFLINE:
        return "is not in the cache, and HF_HUB_OFFLINE keeps it from being fetched"
    return f"is not in the cache, and the hub ({constants.ENDPOINT}) is out of reach: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
