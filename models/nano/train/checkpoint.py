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
    shape_of,
    tokenizer_config,
)
from models.nano.train.tokenizer import PRETOKENIZE_REGEX, save_tokenizer, special_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

INDEX = "model.safetensors.index.json"
SHARDS = ("model.safetensors-00001-of-00002.safetensors", "model.safetensors-00002-of-00002.safetensors")
CHAT_TEMPLATE = Path(__file__).parents[3] / "chat_templates" / "qwen3_5.jinja"
TRUNK_PREFIX = "model.language_model."
# kept in float32 by the official checkpoints: they steer a recurrence over the whole context
FLOAT32 = (".A_log", ".linear_attn.norm.weight")


def new_model(shape: Shape, seed: int) -> tuple[Trunk, MTP]:
    """Trunk and draft head with random weights."""
    torch.manual_seed(seed)
    trunk, mtp = Trunk(shape), MTP(shape)
    initialise(trunk, shape.layers)
    initialise(mtp, shape.layers)
    return trunk, mtp


def vision_tensors(shape: Shape, vision: VisionShape) -> dict[str, Tensor]:
    """A random vision tower under `model.visual.`: nobody looks through it, converters step over it."""
    generator = torch.Generator().manual_seed(0)
    hidden, wide = vision.hidden, vision.hidden * vision.merge**2
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (hidden, 3, vision.temporal_patch, vision.patch, vision.patch),
        "patch_embed.proj.bias": (hidden,),
        "pos_embed.weight": (vision.positions, hidden),
        "merger.norm.weight": (hidden,),
        "merger.norm.bias": (hidden,),
        "merger.linear_fc1.weight": (wide, wide),
        "merger.linear_fc1.bias": (wide,),
        "merger.linear_fc2.weight": (shape.hidden, wide),
        "merger.linear_fc2.bias": (shape.hidden,),
    }
    for i in range(vision.depth):
        shapes |= {
            f"blocks.{i}.norm1.weight": (hidden,),
            f"blocks.{i}.norm1.bias": (hidden,),
            f"blocks.{i}.norm2.weight": (hidden,),
            f"blocks.{i}.norm2.bias": (hidden,),
            f"blocks.{i}.attn.qkv.weight": (3 * hidden, hidden),
            f"blocks.{i}.attn.qkv.bias": (3 * hidden,),
            f"blocks.{i}.attn.proj.weight": (hidden, hidden),
            f"blocks.{i}.attn.proj.bias": (hidden,),
            f"blocks.{i}.mlp.linear_fc1.weight": (vision.ffn, hidden),
            f"blocks.{i}.mlp.linear_fc1.bias": (vision.ffn,),
            f"blocks.{i}.mlp.linear_fc2.weight": (hidden, vision.ffn),
            f"blocks.{i}.mlp.linear_fc2.bias": (hidden,),
        }
    return {
        f"model.visual.{name}": 0.02 * torch.randn(size, generator=generator) for name, size in shapes.items()
    }


def stored(name: str, tensor: Tensor) -> Tensor:
    """The tensor as the checkpoint holds it: bf16, but for the names in FLOAT32."""
    dtype = torch.float32 if name.endswith(FLOAT32) else torch.bfloat16
    return tensor.detach().to("cpu", dtype).contiguous()


def save_checkpoint(folder: Path, trunk: Trunk, mtp: MTP, tokenizer: Tokenizer) -> None:
    """Write all that a converter reads into `folder`, weights and JSON under a temporary name first."""
    shape, vision = trunk.shape, VisionShape()
    folder.mkdir(parents=True, exist_ok=True)
    language = {TRUNK_PREFIX + name: tensor for name, tensor in trunk.state_dict().items()}
    drafts = {f"mtp.{name}": tensor for name, tensor in mtp.state_dict().items()}
    half = TRUNK_PREFIX + f"layers.{shape.layers // 2}."
    cut = next(i for i, name in enumerate(language) if name.startswith(half))
    names = list(language)
    first = {name: language[name] for name in names[:cut]}
    second = {name: language[name] for name in names[cut:]} | drafts | vision_tensors(shape, vision)

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


def load_prefixed(module: nn.Module, tensors: dict[str, Tensor], prefix: str) -> None:
    module.load_state_dict(
        {name[len(prefix) :]: tensor.float() for name, tensor in tensors.items() if name.startswith(prefix)}
    )


def write_json(path: Path, content: dict[str, Any]) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)
