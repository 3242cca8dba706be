"""Finished GGUFs on the Hugging Face hub, fetched once into the hub's own cache.

`hf:owner/repo:Q4_K_M` is a repository and a quant, as its files' names say it. What is in the cache is served
without the network. A download goes on where it was interrupted, and a file gets its name in the cache when
its sha256 is the hub's: huggingface_hub starts again in each process, and compares sizes alone.
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
    os.environ.setdefault("TQDM_MININTERVAL", "10")  # a log wants no ten lines a second

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
    """The model of a repository (owner/name), of a split one the first part, from the cache or else from the
    hub; with `vision` its tower is there, too, where the hub has one.

    `quant`: as in the files' names, or a file's name; None for Q4_K_M, or for the only one that there is.

    Raises:
        HubError: no such repository or quant, access refused, the hub out of reach, no room, or what came is
            not what the hub has.
    """
    cached = _cached(repo, quant or DEFAULT_QUANT)
    if cached is not None and (tower_beside(cached) or not vision):
        return cached
    try:
        info = HfApi().model_info(repo, files_metadata=True)
    except Exception as error:  # of whichever HTTP library the installed hub client is built on
        if (found := cached or (None if quant else _cached(repo, None))) is not None:
            return found
        raise HubError(f"hf:{repo}: {_refusal(error)}") from None
    siblings = {file.rfilename: file for file in info.siblings or []}
    files = choose(repo, quant, siblings).files if cached is None else ()
    tower = tower_of(siblings) if vision else None
    # the tower first: a model that is there whole has all that belongs to it
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
    """Where the hub's cache keeps a repository."""
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")


def _cached(repo: str, quant: str | None) -> Path | None:
    """The newest snapshot's file of that quant, or of any where there is only one."""
    for snapshot in snapshots_of(repo_folder(repo)):
        models = models_of(files_below(snapshot))
        found = models if quant is None else named(models, quant)
        if len(found) == 1:
            return snapshot / found[0].files[0]
    return None


def _download(repo: str, info: ModelInfo, file: RepoSibling) -> Path:
    """Has a file in the cache, under the name that the hub's client looks for; its path there."""
    # what lies in git itself is small, without a sha256; what is larger is fetched by Xet, which checks it
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
    """Raises HubError where the disk has less room than what is still to come."""
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
