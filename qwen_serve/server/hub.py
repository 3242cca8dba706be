"""Fetches GGUFs from the Hugging Face hub once, into the hub's own cache.

`hf:owner/repo:Q4_K_M` is a repository and a quant, as in its files' names. Cached files are served without
the network.
"""

import os
import sys
from pathlib import Path

if not sys.stderr.isatty():
    os.environ.setdefault("TQDM_MININTERVAL", "10")  # at most one line in ten seconds in a log

from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from qwen_serve.common.hub import DownloadError, fetch_blobs, first_line, is_intact, repo_folder
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


def fetch(repo: str, quant: str | None, *, vision: bool) -> Path:
    """The model of a repository (owner/name), from the cache or else the hub; of a split model the first
    part. With `vision` the vision tower is fetched too, if the hub has one.

    `quant`: as in the files' names, or a file's name; None for Q4_K_M, or for the only one.

    Raises:
        HubError: no such repository or quant, access refused, hub unreachable, no disk space, or a
            file that differs from the hub's.
    """
    try:
        cached = _cached(repo, quant or DEFAULT_QUANT)
        if cached is not None and (not vision or _tower(cached)):
            return cached
    except DownloadError as error:
        raise HubError(f"hf:{repo}: {error}") from None
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
        fetch_blobs(info, wanted)
        paths = [Path(hf_hub_download(repo, file.rfilename)) for file in wanted]
    except DownloadError as error:
        raise HubError(f"hf:{repo}: {error}") from None
    except Exception as error:
        raise HubError(
            f"hf:{repo}: could not be fetched: {first_line(error)}; the same command goes on from there"
        ) from None
    return cached or paths[-len(files)]


def _cached(repo: str, quant: str | None) -> Path | None:
    """The model of that quant, or the only model, in the newest snapshot that has exactly one; a split
    model's first part. All of its files have the bytes that were fetched. Raises DownloadError."""
    for snapshot in snapshots_of(repo_folder(repo)):
        models = models_of(files_below(snapshot))
        found = models if quant is None else named(models, quant)
        if len(found) == 1 and all(is_intact(snapshot / name) for name in found[0].files):
            return snapshot / found[0].files[0]
    return None


def _tower(cached: Path) -> Path | None:
    """The tower beside a cached model, if it has the bytes that were fetched. Raises DownloadError."""
    tower = tower_beside(cached)
    return tower if tower is not None and is_intact(tower) else None


def _refusal(error: Exception) -> str:
    if isinstance(error, GatedRepoError):
        return "access is gated; accept its terms on the hub and set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return "the hub knows no such model (private? set HF_TOKEN)"
    if constants.HF_HUB_OFFLINE:
        return "is not in the cache, and HF_HUB_OFFLINE keeps it from being fetched"
    return f"is not in the cache, and the hub ({constants.ENDPOINT}) is out of reach: {first_line(error)}"
