"""Checkpoints in the official layout: two safetensors shards, their index, and the JSON files beside them."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copyfile
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.nano.train.model import Trunk, initialise
from models.nano.train.mtp import MTP
from models.nano.train.shape import (
    Shape,
    VisionShape,
    generation_config,
    model_config,
    preprocessor_config,
    shape_of,
    tokenizer_config,
    vision_config,
)
from models.nano.train.tokenizer import PRETOKENIZE_REGEX, save_tokenizer, special_ids
from models.nano.train.vision import Tower

if TYPE_CHECKING:
    from tokenizers import Tokenizer

INDEX = "model.safetensors.index.json"
SHARDS = ("model.safetensors-00001-of-00002.safetensors", "model.safetensors-00002-of-00002.safetensors")
CHAT_TEMPLATE = Path(__file__).parents[3] / "chat_templates" / "qwen3_5.jinja"
TRUNK_PREFIX = "model.language_model."
VISION_PREFIX = "model.visual."
# kept in float32 by the official checkpoints: they steer a recurrence over the whole context
FLOAT32 = (".A_log", ".linear_attn.norm.weight")


def new_model(shape: Shape, seed: int) -> tuple[Trunk, MTP]:
    """Trunk and draft head with random weights."""
    torch.manual_seed(seed)
    trunk, mtp = Trunk(shape), MTP(shape)
    initialise(trunk, shape.layers)
    initialise(mtp, shape.layers)
    return trunk, mtp


def tower_tensors(tower: Tower) -> dict[str, Tensor]:
    return {VISION_PREFIX + name: tensor for name, tensor in tower.state_dict().items()}


def stored(name: str, tensor: Tensor) -> Tensor:
    """The tensor as the checkpoint holds it: bf16, but for the names in FLOAT32."""
    dtype = torch.float32 if name.endswith(FLOAT32) else torch.bfloat16
    return tensor.detach().to("cpu", dtype).contiguous()


def save_checkpoint(folder: Path, trunk: Trunk, mtp: MTP, tokenizer: Tokenizer) -> None:
    """Write all that a converter reads into `folder`, weights and JSON under a temporary name first. The
    vision tower is an untrained one: `put_tower` replaces it."""
    shape, vision = trunk.shape, VisionShape()
    folder.mkdir(parents=True, exist_ok=True)
    language = {TRUNK_PREFIX + name: tensor for name, tensor in trunk.state_dict().items()}
    drafts = {f"mtp.{name}": tensor for name, tensor in mtp.state_dict().items()}
    half = TRUNK_PREFIX + f"layers.{shape.layers // 2}."
    cut = next(i for i, name in enumerate(language) if name.startswith(half))
    names = list(language)
    first = {name: language[name] for name in names[:cut]}
    second = (
        {name: language[name] for name in names[cut:]} | drafts | tower_tensors(Tower(vision, shape.hidden))
    )

    weight_map: dict[str, str] = {}
    total = 0
    for file, tensors in zip(SHARDS, (first, second), strict=True):
        ready = {name: stored(name, tensor) for name, tensor in tensors.items()}
        total += sum(tensor.nbytes for tensor in ready.values())
        weight_map |= dict.fromkeys(ready, file)
        part = folder / (file + ".part")
        save_file(ready, part, metadata={"format": "pt"})
        part.replace(folder / file)

    ids = special_ids(tokenizer)
    write_json(
        folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    )
    write_json(folder / "config.json", model_config(shape, vision, ids))
    write_json(folder / "generation_config.json", generation_config(ids))
    write_json(folder / "preprocessor_config.json", preprocessor_config(vision))
    write_json(folder / "tokenizer_config.json", tokenizer_config(shape, ids, PRETOKENIZE_REGEX))
    save_tokenizer(tokenizer, folder)
    copyfile(CHAT_TEMPLATE, folder / "chat_template.jinja")


def load_checkpoint(folder: Path) -> tuple[Trunk, MTP]:
    """Trunk and draft head of a checkpoint that `save_checkpoint` wrote, in float32 on the CPU.

    Raises RuntimeError, as torch does, when a tensor is missing or has another shape.
    """
    tensors: dict[str, Tensor] = {}
    for file in SHARDS:
        tensors |= load_file(folder / file)
    shape = shape_of(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    trunk, mtp = Trunk(shape), MTP(shape)
    load_prefixed(trunk, tensors, TRUNK_PREFIX)
    load_prefixed(mtp, tensors, "mtp.")
    return trunk, mtp


def save_tower(path: Path, tower: Tower) -> None:
    """The tower's tensors alone, as the checkpoint holds them."""
    tensors = {name: stored(name, tensor) for name, tensor in tower_tensors(tower).items()}
    part = path.with_name(path.name + ".part")
    save_file(tensors, part, metadata={"format": "pt"})
    part.replace(path)


def put_tower(folder: Path, tower: Tower) -> None:
    """Replace the vision tower of the checkpoint in `folder`; all other tensors stay as they are."""
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    where = {name: file for name, file in index["weight_map"].items() if not name.startswith(VISION_PREFIX)}
    path = folder / SHARDS[1]
    tensors = {name: one for name, one in load_file(path).items() if not name.startswith(VISION_PREFIX)}
    tensors |= {name: stored(name, one) for name, one in tower_tensors(tower).items()}
    part = path.with_name(path.name + ".part")
    save_file(tensors, part, metadata={"format": "pt"})
    part.replace(path)
    where |= dict.fromkeys(tower_tensors(tower), SHARDS[1])
    total = sum(one.nbytes for one in [*tensors.values(), *load_file(folder / SHARDS[0]).values()])
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["vision_config"] = vision_config(tower.shape, config["text_config"]["hidden_size"])
    write_json(folder / "config.json", config)
    write_json(folder / "preprocessor_config.json", preprocessor_config(tower.shape))


def load_tower(path: Path) -> Tower:
    """The tower in a shard or in a file of `save_tower`, in float32 on the CPU."""
    tensors = load_file(path)
    vision = VisionShape()
    tower = Tower(vision, tensors[f"{VISION_PREFIX}merger.linear_fc2.bias"].numel())
    load_prefixed(tower, tensors, VISION_PREFIX)
    return tower


def load_prefixed(module: nn.Module, tensors: dict[str, Tensor], prefix: str) -> None:
    module.load_state_dict(
        {name[len(prefix) :]: tensor.float() for name, tensor in tensors.items() if name.startswith(prefix)}
    )


def write_json(path: Path, content: dict[str, Any]) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)
