"""Locates a model: a folder, a model on the Hugging Face hub, or a GGUF."""

import re
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from qwen_serve.common.hub import DownloadError, fetch_blobs, first_line
from qwen_serve.convert.checkpoint import (
    INDEX,
    MODELOPT,
    MORE_TEXTS,
    PREPROCESSOR_FILES,
    QUANTIZERS,
    TEXT_FILES,
)
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.tensors import FLOAT_TYPES

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(?<!\.gguf)")
PATTERNS = (
    *TEXT_FILES,
    MORE_TEXTS,
    *PREPROCESSOR_FILES,
    INDEX,
    MODELOPT,
    *QUANTIZERS,
    "*.safetensors",
    "adapter_config.json",
    "LICENSE*",
)


@dataclass(frozen=True)
class Source:
    """A checkpoint's folder, with its hub model if that is known; or a GGUF file."""

    path: Path
    repo_id: str | None = None
    revision: str | None = None

    @property
    def name(self) -> str:
        """The stem of the output files: the hub model's or the folder's own name, a GGUF's without its
        type."""
        if self.repo_id:
            return self.repo_id.rpartition("/")[2]
        if not self.is_gguf:
            return self.path.resolve().name
        return re.sub(f"-({'|'.join(FLOAT_TYPES)})$", "", self.path.stem)

    @property
    def title(self) -> str:
        """The name in reports: the hub id, or the name of the folder or file."""
        return self.repo_id or (self.path.name if self.is_gguf else self.name)

    @property
    def is_gguf(self) -> bool:
        return self.path.is_file()

    @property
    def url(self) -> str | None:
        return f"https://huggingface.co/{self.repo_id}" if self.repo_id else None


def resolve(src: str, revision: str | None = None) -> Source:
    """Finds `src`: a folder, a file or a hub id such as Qwen/Qwen3.5-4B, which is downloaded into the cache.

    Raises:
        ConvertError: `src` does not exist, access is refused, the hub cannot be reached, or the disk is too
            small; or `revision` is given and `src` is no hub id.
    """
    path = Path(src).expanduser()
    if path.exists():
        if revision is not None:
            raise ConvertError(f"--revision {revision}: is for hub ids, and {src} is on this disk")
        return _recognise(path)
    if not HUB_ID.fullmatch(src):
        raise ConvertError(f"--src {src}: no such file or folder, and not a hub id such as Qwen/Qwen3.5-4B")
    try:
        if not constants.HF_HUB_OFFLINE:
            _fetch_weights(src, revision)
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
    except DownloadError as error:
        raise ConvertError(f"--src {src}: {error}") from None
    except Exception as error:  # of whichever HTTP library the installed hub client is built on
        raise ConvertError(
            f"--src {src}: no such folder, and it could not be fetched from the hub: {first_line(error)}"
        ) from None
    return Source(downloaded, repo_id=src, revision=downloaded.name)


def resolve_config(src: str) -> Path:
    """The config.json of a checkpoint in a folder or on the hub; fetches nothing else.

    Raises:
        ConvertError: there is none, or the hub cannot be reached.
    """
    path = Path(src).expanduser()
    if path.exists():
        if not (config := path / "config.json").is_file():
            raise ConvertError("there is no config.json: want the folder of a checkpoint, or its hub id")
        return config
    if not HUB_ID.fullmatch(src):
        raise ConvertError("no such folder, and not a hub id such as Qwen/Qwen3.5-4B")
    try:
        return Path(hf_hub_download(src, "config.json"))
    except Exception as error:  # of whichever HTTP library the installed hub client is built on
        raise ConvertError(
            f"no such folder, and it could not be fetched from the hub: {first_line(error)}"
        ) from None


def _recognise(path: Path) -> Source:
    """Finds the hub model of a snapshot folder. The folder is named after a commit, its grandparent after the
    model."""
    folder = path.resolve()
    owner_and_name = folder.parent.parent.name.split("--")
    if folder.parent.name == "snapshots" and owner_and_name[0] == "models" and len(owner_and_name) == 3:
        return Source(path, repo_id="/".join(owner_and_name[1:]), revision=folder.name)
    return Source(path)


def _fetch_weights(repo_id: str, revision: str | None) -> None:
    try:
        info = HfApi().model_info(repo_id, revision=revision, files_metadata=True)
    except Exception:  # unreachable or refused: snapshot_download reports it, unless the cache is complete
        return
    files = info.siblings or []
    fetch_blobs(info, [one for one in files if any(fnmatch(one.rfilename, pattern) for pattern in PATTERNS)])
