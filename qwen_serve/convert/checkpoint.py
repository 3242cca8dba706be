"""A checkpoint folder in the official layout: its JSON files, and its tensors, which are read later."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from qwen_serve.convert.config import ModelConfig
from qwen_serve.convert.config_levels import INNER, TIED
from qwen_serve.convert.errors import CheckpointError
from qwen_serve.convert.floats import to_f32
from qwen_serve.convert.prequantized import method_of, with_weights
from qwen_serve.convert.safetensors import StoredTensor, read_header
from qwen_serve.convert.stages import file_digest, fingerprint

SMALL_SHARD = 64_000_000  # bytes; a shard up to this size is hashed quickly
HEAD_CHUNK = 1 << 20  # elements of embedding and head that are compared at a time
INDEX = "model.safetensors.index.json"
SINGLE, SHARDS, MTP_FILES = "model.safetensors", "model*.safetensors", "*mtp*.safetensors"
PICKLED = ("*.bin", "*.pt", "*.pth")
SHARD = re.compile(r"model(?:\.safetensors)?-(\d+)-of-(\d+)\.safetensors")
MTP_NAME = re.compile(r"(?:(?:model|language_model)\.)*mtp\.")
OWN = ("model.", "lm_head.", "mtp.")
"""Beginnings of official names. Trainers save other heads beside them, such as `v_head.`"""
BUFFER = ".inv_freq"
"""End of the names of tables that older versions of transformers saved, and that follow from config.json."""
HEAD, EMBEDDINGS = "lm_head.weight", ("model.language_model.embed_tokens.weight", "model.embed_tokens.weight")
WRAPPERS = re.compile(r"(?:_orig_mod\.|_fsdp_wrapped_module\.|module\.|base_model\.model\.)+")
"""What torch.compile, FSDP, DDP and PEFT put before every name, if the wrapped model is saved."""
NAMES = (
    (re.compile(r"(?:(?:model|language_model)\.)*(?=(?:lm_head|mtp)\.)"), ""),
    (re.compile(r"(?:(?:model|language_model)\.)*(?=visual\.)"), "model."),
    (re.compile(r"(?:model\.)?language_model\.(?:model\.)?"), "model.language_model."),
)
"""Beginnings of names, and the official ones in their place. llama.cpp's converter takes all of them
(conversion/base.py, `filter_tensors`; qwen.py)."""
TEXT_FILES = (  # everything besides the tensors that ends up in the GGUF
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "README.md",
)
MODELOPT = "hf_quant_config.json"
QUANTIZERS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files of AutoGPTQ and AutoAWQ, and the method if they do not name it."""
MORE_TEXTS = "additional_chat_templates/*.jinja"
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
        if not method_of(values) and (said := _method_beside(folder)):
            values["quantization_config"] = said
        config = ModelConfig.from_json(values)
        named = official_names(read_tensors(folder))
        foreign = [name for name in named if not name.startswith(OWN)]
        own = {name: tensor for name, tensor in named.items() if name.startswith(OWN)}
        tensors = with_weights(own, method_of(values))
        if foreign and any(name in own for name in EMBEDDINGS):
            more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
            remark = f"{foreign[0]}{more}: no part of the language model, left out as in transformers"
            config = replace(config, remarks=(*config.remarks, remark))
        config = _with_own_head(config, values, tensors)
        if config.n_mtp_layers and not any(name.startswith("mtp.") for name in tensors):
            remark = (
                "config.json: mtp_num_hidden_layers is 1, and there are no tensors mtp.*: the head that "
                "drafts is left out"
            )
            config = replace(config, remarks=(*config.remarks, remark))
        return cls(folder, config, tensors)

    @property
    def used_experts(self) -> int | None:
        """Experts of a block that a token uses; None for a dense model."""
        return self.config.experts.used if self.config.experts is not None else None

    def fingerprint(self) -> str:
        """A digest that changes with every input file: with its content or, for large shards, size and
        time."""
        paths = [self.folder / name for name in (*TEXT_FILES, MODELOPT, *QUANTIZERS)]
        paths += sorted(self.folder.glob(MORE_TEXTS))
        texts = {path.name: file_digest(path) for path in paths if path.is_file()}
        return fingerprint({"shards": shard_stamps(self.tensors), "texts": texts})


def _method_beside(folder: Path) -> dict[str, Any] | None:
    """How a checkpoint is quantized, by the files in which modelopt, AutoGPTQ and AutoAWQ used to say it."""
    if (folder / MODELOPT).is_file():
        return {"quant_method": "modelopt", **(read_json(folder / MODELOPT).get("quantization") or {})}
    for name, method in QUANTIZERS.items():
        if (folder / name).is_file():
            return {"quant_method": method, **read_json(folder / name)}
    return None


def read_config(path: Path) -> ModelConfig:
    """The configuration in `path`, a `config.json`. If the weights lie beside it, they decide whether there
    is a head of its own.

    Raises:
        CheckpointError: as `Checkpoint.open`.
    """
    if any(path.parent.glob(SHARDS)):
        return Checkpoint.open(path.parent).config
    return ModelConfig.from_json(read_json(path))


def official_names(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors under the names of the official layout; each knows its own.

    Raises:
        CheckpointError: two have the same.
    """
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if wrapped := WRAPPERS.match(name):
            name = name[wrapped.end() :]
        for pattern, prefix in NAMES:
            if match := pattern.match(name):
                name = prefix + name[match.end() :]
                break
        if name.endswith(BUFFER):
            continue
        if name in found:
            raise CheckpointError(
                f"{tensor.path}: tensors {found[name].name} and {tensor.name} are both {name}"
            )
        found[name] = tensor
    return found


def _with_own_head(
    config: ModelConfig, values: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> ModelConfig:
    """`config`, tied only if the head is the embedding, whatever the configuration says."""
    head, said = tensors.get(HEAD), config.tied_embeddings
    embedding = next((tensors[name] for name in EMBEDDINGS if name in tensors), None)
    if said and head is not None and embedding is not None and not _is_equal(head, embedding):
        remark = (
            f"config.json: {TIED} is true, and {HEAD} differs from the embedding: it is kept as the head, as "
            "in transformers"
        )
        return replace(config, tied_embeddings=False, remarks=(*config.remarks, remark))
    if head is None and not said and any(v.get(TIED) is True for v in (values, values.get(INNER) or {})):
        remark = (
            f"config.json: {TIED} is true on one level alone, where transformers does not read it; as there "
            f"is no {HEAD}, the embedding is the head"
        )
        return replace(config, tied_embeddings=True, remarks=(*config.remarks, remark))
    return config


def _is_equal(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether two tensors have the same values; reads them until they differ."""
    if a.shape != b.shape:
        return False
    for start in range(0, a.n_elements, HEAD_CHUNK):
        count = min(HEAD_CHUNK, a.n_elements - start)
        left, right = (to_f32(each.read(start, count), each.dtype) for each in (a, b))
        if not np.array_equal(left, right, equal_nan=True):
            return False
    return True


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
    weight_map = _weight_map(folder)
    tensors: dict[str, StoredTensor] = {}
    for shard in _shards(folder, weight_map):
        for tensor in read_header(shard):
            if tensor.name in tensors:
                raise CheckpointError(
                    f"{shard}: tensor {tensor.name} is also in {tensors[tensor.name].path.name}"
                )
            tensors[tensor.name] = tensor
    for name, file in weight_map.items():
        if name not in tensors:
            raise CheckpointError(f"{folder / file}: tensor {name}, promised by {INDEX}, is not in it")
    used = {tensor.path for tensor in tensors.values()}
    for path in sorted({*folder.glob(MTP_FILES)} - used):  # tools that keep a head in a file of its own
        for tensor in read_header(path):
            if MTP_NAME.match(tensor.name):
                tensors.setdefault(tensor.name, tensor)
    return tensors


def read_json(path: Path) -> dict[str, Any]:
    """Parses a JSON object; a missing or malformed file is a CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin files with a BOM
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}; is this a Qwen3.5 checkpoint?") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return value


def _weight_map(folder: Path) -> dict[str, str]:
    """Name of each tensor -> name of its file, by the index; empty without one, or if it is an older
    checkpoint's."""
    if not (folder / INDEX).is_file():
        return {}
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX}: weight_map must map tensor names to shard names")
    for tensor, shard in weight_map.items():
        path = PurePosixPath(shard) if isinstance(shard, str) else None
        if path is None or path.is_absolute() or ".." in path.parts or path.suffix != ".safetensors":
            raise CheckpointError(
                f"{folder / INDEX}: weight_map has {shard!r:.80} for {tensor}; want the name of a file in "
                "this folder, *.safetensors"
            )
    if (folder / SINGLE).is_file() and SINGLE not in weight_map.values():
        print(
            f"{folder}: {SINGLE} is read, as in transformers; {INDEX} names other files, which are not",
            file=sys.stderr,
        )
        return {}
    return weight_map


def _shards(folder: Path, weight_map: Mapping[str, str]) -> list[Path]:
    if weight_map:
        names = sorted(set(weight_map.values()))
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise CheckpointError(
                f"{folder}: {len(missing)} of {len(names)} shards named in {INDEX} are missing: "
                f"{', '.join(missing)}"
            )
        return [folder / name for name in names]
    if (single := folder / SINGLE).is_file():
        return [single]
    if not (shards := sorted(folder.glob(SHARDS))):
        others = [path.name for end in PICKLED for path in sorted(folder.glob(end))]
        hint = f"; {others[0]} is pickled: save it with `save_pretrained` of transformers 5" if others else ""
        raise CheckpointError(f"{folder} has neither {INDEX} nor {SINGLE}, nor others {SHARDS}{hint}")
    parts = [SHARD.fullmatch(path.name) for path in shards]
    counts = {int(part[2]) for part in parts if part}
    if len(counts) == 1 and all(parts) and len(shards) != (count := counts.pop()):
        raise CheckpointError(f"{folder}: {len(shards)} of {count} shards are there; download the others")
    return shards
