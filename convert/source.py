"""Where a checkpoint comes from: a folder, or a model on the Hugging Face hub."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from convert.checkpoint import INDEX, TEXT_FILES
from convert.errors import ConvertError
from convert.progress import size

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
PATTERNS = (*TEXT_FILES, INDEX, "*.safetensors", "LICENSE*")


@dataclass(frozen=True)
class Source:
    """A checkpoint on disk, and the hub model it is a copy of, where that is known."""

    folder: Path
    repo_id: str | None = None
    revision: str | None = None

    @property
    def name(self) -> str:
        """The stem of the output files: the hub model's or the folder's own name."""
        return self.repo_id.rpartition("/")[2] if self.repo_id else self.folder.resolve().name

    @property
    def url(self) -> str | None:
        return f"https://huggingface.co/{self.repo_id}" if self.repo_id else None


def resolve(src: str, revision: str | None = None) -> Source:
    """Finds `src`, a folder or a hub id such as Qwen/Qwen3.5-4B, downloading what is not in the cache yet.

    Raises:
        ConvertError: neither exists, access is refused, the hub cannot be reached, or the disk is too small.
    """
    folder = Path(src).expanduser()
    if folder.is_dir():
        return _recognise(folder)
    if not HUB_ID.fullmatch(src):
        raise ConvertError(f"--src {src}: no such folder, and not a hub id such as Qwen/Qwen3.5-4B")
    if not constants.HF_HUB_OFFLINE:
        _check_room(src, revision)
    try:
        downloaded = Path(snapshot_download(src, revision=revision, allow_patterns=list(PATTERNS)))
    except GatedRepoError:
        raise ConvertError(
            f"--src {src}: access is gated; accept its terms on the hub and set HF_TOKEN"
        ) from None
    except RepositoryNotFoundError:
        raise ConvertError(
            f"--src {src}: no such folder, and the hub knows no such model (private? set HF_TOKEN)"
        ) from None
    except RevisionNotFoundError:
        raise ConvertError(f"--revision {revision}: {src} has no such revision") from None
    except Exception as error:  # of whichever HTTP library the installed hub client is built on
        raise ConvertError(
            f"--src {src}: no such folder, and it could not be fetched from the hub: {_first_line(error)}"
        ) from None
    return Source(downloaded, repo_id=src, revision=downloaded.name)


def _recognise(folder: Path) -> Source:
    """A snapshot folder of the hub's cache is named after a commit; its grandparent tells the model."""
    path = folder.resolve()
    owner_and_name = path.parent.parent.name.split("--")
    if path.parent.name == "snapshots" and owner_and_name[0] == "models" and len(owner_and_name) == 3:
        return Source(folder, repo_id="/".join(owner_and_name[1:]), revision=path.name)
    return Source(folder)


def _check_room(repo_id: str, revision: str | None) -> None:
    try:
        info = HfApi().model_info(repo_id, revision=revision, files_metadata=True)
    except Exception:  # out of reach or refused: the download says so, unless the cache has it all
        return
    missing = sum(
        file.size or 0
        for file in info.siblings or []
        if file.rfilename.endswith(".safetensors")
        and not isinstance(try_to_load_from_cache(repo_id, file.rfilename, revision=info.sha), str)
    )
    cache = Path(constants.HF_HUB_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    if missing > (free := shutil.disk_usage(cache).free):
        raise ConvertError(
            f"--src {repo_id}: {size(missing)} to download, {size(free)} free under {cache}; "
            "make room, or point HF_HOME to a larger disk"
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
