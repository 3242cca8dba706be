"""LoRA adapters of random checkpoints, in PEFT's format, and the checkpoints merged with them."""

import json
import shutil
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_serve.convert.checkpoint import Checkpoint
from qwen_serve.convert.floats import to_f32
from qwen_serve.convert.safetensors import StoredTensor, read_header, write_file

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DELTA_NET = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
PROJECTIONS = (*LINEAR, *DELTA_NET)
"""Every linear layer of the trunk, as `target_modules` has them."""

Matrices = dict[str, npt.NDArray[np.float32]]


def write_adapter(
    folder: Path,
    checkpoint: Path,
    *,
    rank: int = 8,
    alpha: float = 16,
    size: float = 0.5,
    projections: tuple[str, ...] = PROJECTIONS,
    embedding: bool = False,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write an adapter with seeded A and B for every projection of the trunk. At a scale of 1 it changes
    weights by up to about `size` of their own size. `embedding`: adapt the embedding, too. `config`: further
    keys of adapter_config.json."""
    folder.mkdir(parents=True)
    tensors = []
    for name, stored in Checkpoint.open(checkpoint).tensors.items():
        module = name.removesuffix(".weight")
        last = module.rpartition(".")[2]
        trunk = (
            ".layers." in name and ".experts." not in name and not name.startswith(("mtp.", "model.visual."))
        )
        is_embedding = embedding and last == "embed_tokens"
        if not (trunk and last in projections) and not is_embedding:
            continue
        rows, columns = stored.shape[::-1] if is_embedding else stored.shape
        random = np.random.default_rng([seed, *name.encode()])
        own = float(to_f32(stored.read(), stored.dtype).std())
        a = random.standard_normal((rank, columns), np.float32)
        b = random.standard_normal((rows, rank), np.float32)
        b *= np.float32(size * own / np.sqrt(rank) * rank / alpha)
        kind, end = ("lora_embedding_", "") if is_embedding else ("lora_", ".weight")
        tensors += [
            (f"base_model.model.{module}.{kind}{part}{end}", "F32", w)
            for part, w in zip("AB", (a, b), strict=True)
        ]
    write_file(folder / "adapter_model.safetensors", tensors, {"format": "pt"})
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(checkpoint),
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": [*projections, *(["embed_tokens"] if embedding else [])],
        "init_lora_weights": True,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(about), encoding="utf-8")
    return folder


def merge(folder: Path, checkpoint: Path, adapters: Mapping[Path, float]) -> Path:
    """Write a copy of the checkpoint, in F32, with the weights W + scale * B A for each adapter and its
    scale."""
    changes: Matrices = defaultdict(lambda: np.zeros(1, np.float32))
    for adapter, scale in adapters.items():
        for name, change in deltas(adapter).items():
            changes[name] = changes[name] + np.float32(scale) * change
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors", "train", "heldout"))
    weight_map: dict[str, str] = {}
    by_shard: dict[str, list[StoredTensor]] = defaultdict(list)
    for tensor in Checkpoint.open(checkpoint).tensors.values():
        by_shard[tensor.path.name].append(tensor)
    for shard, stored in by_shard.items():
        merged = []
        for tensor in stored:
            weight = to_f32(tensor.read(), tensor.dtype).reshape(tensor.shape)
            merged.append((tensor.name, "F32", weight + changes.pop(tensor.name, np.float32(0))))
            weight_map[tensor.name] = shard
        write_file(folder / shard, merged, {"format": "pt"})
    assert not changes, f"{[*changes]} are of another checkpoint"
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def deltas(adapter: Path) -> Matrices:
    """alpha / rank * B A by the name of the weight, as in PEFT's `get_delta_weight`."""
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    read = {tensor.name: tensor for tensor in read_header(adapter / "adapter_model.safetensors")}
    found: Matrices = {}
    for name, tensor in read.items():
        for kind in ("lora_A", "lora_embedding_A"):
            if f".{kind}" in name:
                module = name.partition(f".{kind}")[0].removeprefix("base_model.model.")
                a = tensor.read().reshape(tensor.shape)
                other = read[name.replace(kind, f"{kind[:-1]}B")]
                b = other.read().reshape(other.shape)
                alpha = config.get("alpha_pattern", {}).get(module.rpartition(".")[2], config["lora_alpha"])
                scale = alpha / (np.sqrt(len(a)) if config.get("use_rslora") else len(a))
                delta = np.float32(scale) * (b @ a)
                found[f"{module}.weight"] = delta.T if "embedding" in kind else delta
    return found
