"""A checkpoint folder in the official layout: its JSON files, and its tensors, which are read later."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qwen_serve.convert.config import ModelConfig
from qwen_serve.convert.errors import CheckpointError
from qwen_serve.convert.prequantized import with_weights
from qwen_serve.convert.safetensors import StoredTensor, read_header
from qwen_serve.convert.stages import file_digest, fingerprint

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SMALL_SHARD = 64_000_000  # bytes; a shard up to this size is hashed quickly
INDEX = "model.safetensors.index.json"
TEXT_FILES = (  # everything besides the tensors that ends up in the GGUF
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "README.md",
)
PREPROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files that describe the preprocessing of pictures. The second takes precedence; newer checkpoints have it
there, one level deeper."""


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. Its configuration is parsed and every shard's header is checked; no weight is
    read."""

    folder: Path
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Opens `folder` and checks what can be checked without reading weights.

        Raises:
            CheckpointError: a file is missing, damaged or of another architecture; the message says which.
        """
        values = read_json(folder / "config.json")
        config = ModelConfig.from_json(values)
        method = values.get("text_config", {}).get("quantization_config") or values.get("quantization_config")
        return cls(folder, config, with_weights(read_tensors(folder), method))

    @property
    def used_experts(self) -> int | None:
        """Experts of a block that a token uses; None for a dense model."""
        return self.config.experts.used if self.config.experts is not None else None

    def fingerprint(self) -> str:
        """A digest that changes with every input file: with its content or, for large shards, size and
        time."""
        texts = {
            name: file_digest(self.folder / name) for name in TEXT_FILES if (self.folder / name).is_file()
        }
        return fingerprint({"shards": shard_stamps(self.tensors), "texts": texts})


def shard_stamps(tensors: Mapping[str, StoredTensor]) -> list[tuple[str, int, str | int]]:
    """Name, size, and content or time of every file that has any of the tensors."""
    shards = sorted({tensor.path for tensor in tensors.values()})
    return [(path.name, path.stat().st_size, content_or_time(path)) for path in shards]


def content_or_time(path: Path) -> str | int:
    """Distinguishes files of one size: the digest of a small file, the modification time of a large one."""
    status = path.stat()
    return file_digest(path) if status.st_size <= SMALL_SHARD else status.st_mtime_ns


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of all shards of a checkpoint folder, by name.

    Raises:
        CheckpointError: a shard is missing or damaged, or a tensor is duplicated or missing.
    """
    tensors: dict[str, StoredTensor] = {}
    for shard in _shards(folder):
        for tensor in read_header(shard):
            if tensor.name in tensors:
                raise CheckpointError(
                    f"{shard}: tensor {tensor.name} is also in {tensors[tensor.name].path.name}"
                )
            tensors[tensor.name] = tensor
    _check_against_index(folder, tensors)
    return tensors


def read_json(path: Path) -> dict[str, Any]:
    """Parses a JSON object; a missing or malformed file is a CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}; is this a Qwen3.5 checkpoint?") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return value


def _weight_map(folder: Path) -> dict[str, str]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX}: weight_map must map tensor names to shard names")
    return weight_map


def _shards(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        names = sorted(set(_weight_map(folder).values()))
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise CheckpointError(
                f"{folder}: {len(missing)} of {len(names)} shards named in {INDEX} are missing: "
                f"{', '.join(missing)}"
            )
        return [folder / name for name in names]
    if not (single := folder / "model.safetensors").is_file():
        raise CheckpointError(f"{folder} has neither {INDEX} nor {single.name}")
    return [single]


def _check_against_index(folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
    if not (folder / INDEX).is_file():
        return
    for name, shard in _weight_map(folder).items():
        if name not in tensors:
            raise CheckpointError(f"{folder / shard}: tensor {name}, promised by {INDEX}, is not in it")
