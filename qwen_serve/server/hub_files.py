"""Recognizes the files of a model's repository on the Hugging Face hub by their names.

Publishers of GGUFs share only naming conventions: `NAME-Q4_K_M.gguf`, `mmproj-F16.gguf`,
`-00001-of-00003.gguf`.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

DEFAULT_QUANT = "Q4_K_M"

SPLIT = re.compile(r"-(\d{5})-of-(\d{5})$")
"""The suffix that llama-gguf-split gives to parts."""

LABEL = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|BF16|F16|F32|(?:MXFP|NVFP)4(?:_[A-Z0-9]+)*))$",
    re.IGNORECASE,
)
"""The quant at the end of a file's name: UD-Q4_K_XL."""

MMPROJ_TYPES = ("F16", "BF16", "Q8_0", "F32")
"""Preferred types of the vision tower, the best first."""


class HubError(Exception):
    """The model cannot be fetched; the message says why, or lists the models that exist."""


@dataclass(frozen=True)
class Weights:
    """A model's files in a repository, its parts in order."""

    quant: str
    files: tuple[str, ...]


def models_of(names: Iterable[str]) -> list[Weights]:
    """The models among a repository's files, by name; a split one needs all its parts."""
    parts: dict[str, list[str]] = {}
    for name in sorted(names):
        path = PurePosixPath(name)
        if path.suffix.lower() == ".gguf" and not is_mmproj(name) and "imatrix" not in path.name.lower():
            parts.setdefault(SPLIT.sub("", name[: -len(".gguf")]), []).append(name)
    found = []
    for stem, files in parts.items():
        split = SPLIT.search(files[0][: -len(".gguf")])
        if len(files) == (int(split[2]) if split else 1):
            label = LABEL.search(PurePosixPath(stem).name)
            found.append(Weights(label[1].upper() if label else PurePosixPath(stem).name, tuple(files)))
    return found


def is_later_part(name: str) -> bool:
    """Whether a file is a later part of a split model."""
    split = SPLIT.search(name.removesuffix(".gguf"))
    return split is not None and int(split[1]) > 1


def is_mmproj(name: str) -> bool:
    """Whether a file is a vision tower, by its name."""
    return "mmproj" in PurePosixPath(name).name.lower()


def choose(repo: str, quant: str | None, names: Iterable[str]) -> Weights:
    """The model among a repository's files that `quant` selects. Raises HubError listing the choices."""
    names = list(names)
    models = models_of(names)
    if not models:
        checkpoint = any(name.endswith(".safetensors") for name in names)
        raise HubError(
            f"hf:{repo}: has no GGUF"
            + (f"; it is a checkpoint: `qwen-serve serve {repo}` converts it" if checkpoint else "")
        )
    if quant is None:
        found = named(models, DEFAULT_QUANT) or (models if len(models) == 1 else [])
    else:
        found = named(models, quant)
    if len(found) == 1:
        return found[0]
    if found:
        files = ", ".join(model.files[0] for model in found)
        raise HubError(f"hf:{repo}: several files are {quant or DEFAULT_QUANT}: name one of {files}")
    there = ", ".join(sorted({model.quant for model in models}))
    raise HubError(f"hf:{repo}: has no {quant or DEFAULT_QUANT}; it has {there}")


def named(models: Sequence[Weights], quant: str) -> list[Weights]:
    """The models named `quant`, or if there are none, those of Unsloth's variant of it."""
    wanted = quant.upper()
    for names in ((wanted,), (f"UD-{wanted}",)):
        if found := [model for model in models if model.quant.upper() in names]:
            return found
    return [model for model in models if quant in (model.files[0], PurePosixPath(model.files[0]).name)]


def tower_of(names: Iterable[str]) -> str | None:
    """A repository's vision tower, by its files' names; of several the first of MMPROJ_TYPES."""
    towers = sorted(name for name in names if is_mmproj(name) and name.lower().endswith(".gguf"))
    ranked = {kind: rank for rank, kind in enumerate(MMPROJ_TYPES)}

    def rank(name: str) -> int:
        label = LABEL.search(PurePosixPath(name).stem)
        return ranked.get(label[1].upper() if label else "", len(ranked))

    return min(towers, key=rank, default=None)


def snapshots_of(home: Path) -> list[Path]:
    """A repository's snapshots in the hub's cache, the newest first."""
    return sorted((home / "snapshots").glob("*"), key=lambda path: path.stat().st_mtime, reverse=True)


def files_below(snapshot: Path) -> list[str]:
    """A snapshot's files by their names on the hub; broken links are left out."""
    return [
        Path(folder, name).relative_to(snapshot).as_posix()
        for folder, _, names in os.walk(snapshot)
        for name in names
        if Path(folder, name).exists()
    ]


def tower_beside(model: Path) -> Path | None:
    """The vision tower in `model`'s snapshot in the hub's cache; None for a model elsewhere."""
    for folder in model.absolute().parents:
        if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
            tower = tower_of(files_below(folder))
            return folder / tower if tower else None
    return None
