"""LoRA adapters: converts a PEFT checkpoint to a GGUF that llama.cpp applies to the model.

A product W x becomes W x + scale * B (A x). If the conversion reorders a tensor of the model, the rows of B
or the columns of A are reordered in the same way. llama.cpp multiplies by alpha / rank, with one alpha for
the whole file. If a module has another factor (rsLoRA, `alpha_pattern`), its B is multiplied by it. Names and
keys in the GGUF are llama.cpp's (src/llama-adapter.cpp; convert_lora_to_gguf.py), those in the checkpoint are
PEFT's.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from qwen_serve.convert.checkpoint import read_config, read_json
from qwen_serve.convert.config import ModelConfig, is_positive
from qwen_serve.convert.errors import CheckpointError, ConvertError
from qwen_serve.convert.gguf_file import write_file
from qwen_serve.convert.metadata import add_general
from qwen_serve.convert.safetensors import StoredTensor, read_header
from qwen_serve.convert.source import Source, resolve_config
from qwen_serve.convert.stages import Output, StageRecord, file_digest, fingerprint
from qwen_serve.convert.tensors import (
    EMBEDDING,
    OUTPUT,
    FloatType,
    PlannedTensor,
    Rule,
    TensorPlan,
    check_weight_type,
    expected_tensors,
)
from qwen_serve.convert.transforms import Array, tile_columns

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE_LAYER = ".base_layer.weight"
"""End of the name of a copy of the model's own weight. PEFT saves it for an adapted embedding or head, in
case the vocabulary was resized (`save_embedding_layers`)."""
VERSION = 2
"""Part of every output's fingerprint: raise it whenever the same adapter would be converted differently."""

NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)\.lora_(?:embedding_)?(?P<part>[AB])(?:\.default)?(?:\.weight)?"
)
PREFIX = re.compile(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?")
"""Prefix before `layers.` in a module's name, in models with vision and without."""

PLAIN = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the model's weights unchanged."""
REFUSED = {
    "use_qalora": "QA-LoRA adds up inputs by groups, which llama.cpp does not",
    "use_bdlora": "BD-LoRA has block-diagonal matrices, which llama.cpp does not apply",
    "kasa_config": "KaSA also changes the model's own weights; merge it into the checkpoint",
    "monteclora_config": "MonteCLoRA mixes drawn matrices; merge it into the checkpoint",
    "use_dora": "DoRA also scales each row of the sum, which llama.cpp does not",
    "lora_bias": "llama.cpp adds no bias of an adapter",
    "modules_to_save": "modules that were trained whole are no adapter; merge it into the checkpoint",
    "trainable_token_indices": "tokens that were trained whole are no adapter; merge it into the checkpoint",
    "target_parameters": "routed experts have no adapters here; merge it into the checkpoint",
    "layer_replication": "layers are not repeated; merge it into the checkpoint",
    "alora_invocation_tokens": "an activated LoRA, which begins in the middle of a prompt, is not served",
}
"""Key of the adapter's configuration -> why an adapter that sets it is refused."""


@dataclass(frozen=True)
class Adapter:
    """An opened PEFT checkpoint with its model's configuration; no weight is read yet."""

    folder: Path
    base: ModelConfig
    alpha: float
    plan: TensorPlan

    @classmethod
    def open(cls, folder: Path, base: ModelConfig, outtype: FloatType) -> Adapter:
        """
        Raises:
            CheckpointError: a file is missing or damaged, the adapter is of a kind that llama.cpp does not
                apply, or it is another model's.
        """
        config = read_json(folder / CONFIG)
        _check(folder, config)
        if not (weights := folder / WEIGHTS).is_file():
            raise CheckpointError(f"{folder} has no {WEIGHTS}; save the adapter with safe serialization")
        rules = _rules(base)
        tensors: list[PlannedTensor] = []
        for module, (a, b) in _pairs(weights).items():
            if (found := rules.get(PREFIX.sub("", module))) is None:
                raise CheckpointError(f"{weights}: {_unknown(module, base)}")
            target, rule = found
            factor = _factor(config, module, a.shape[0])
            tensors += _planned(a, b, target, rule, base, factor, outtype)
        if not tensors:
            raise CheckpointError(f"{weights} holds no tensor")
        return cls(folder, base, float(config["lora_alpha"]), TensorPlan(tuple(tensors), 0, 0))

    def write(self, path: Path, source: Source) -> None:
        """Writes the GGUF to `path`. Raises CheckpointError: a weight is not finite or does not fit."""
        writer = gguf.GGUFWriter(path=None, arch=self.base.arch)
        add_general(writer, self.folder, source, self.plan, gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, self.alpha)
        write_file(path, writer, self.plan, self.base)


def is_adapter(path: Path) -> bool:
    """Whether a source is a PEFT checkpoint."""
    return (path / CONFIG).is_file()


def convert_adapter(
    source: Source, base: str | None, out: Path, name: str, outtype: FloatType, *, force: bool
) -> Path:
    """Makes `<out>/<name>-<outtype>.gguf`, unless it exists. `base` is the location of the model's
    config.json; None for the one that the adapter's configuration names.

    Raises:
        ConvertError: the model's configuration is unavailable, or the adapter cannot be converted.
    """
    named = base or read_json(source.path / CONFIG).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise ConvertError(
            f"{source.path / CONFIG} does not name the model that it is for: give --base, a folder or hub id"
        )
    try:
        config = resolve_config(named)
    except ConvertError as error:
        hint = "" if base else f" ({CONFIG} names it; --base names another folder or hub id)"
        raise ConvertError(f"--base {named}: {error}{hint}") from None
    adapter = Adapter.open(source.path, read_config(config), outtype)
    made_from = {
        "adapter": VERSION,
        "type": outtype,
        "files": [file_digest(path) for path in (source.path / CONFIG, source.path / WEIGHTS, config)],
        "source": [source.name, source.repo_id, source.revision],
    }
    output = Output(out / f"{name}-{outtype}.gguf", fingerprint(made_from))
    with StageRecord.locked(out, name, force=force) as record:
        record.check_room([(output, adapter.plan.nbytes + 1_000_000)])
        record.make(output, lambda part: adapter.write(part, source))
    print(f"{output.path}: adapts {len(adapter.plan.tensors) // 2} matrices; to serve it beside its model:")
    print(f"  python -m qwen_serve.server --model MODEL.gguf --lora {shlex.quote(f'{name}={output.path}')}")
    return output.path


def _check(folder: Path, config: Mapping[str, Any]) -> None:
    at = folder / CONFIG
    if (kind := config.get("peft_type")) != "LORA":
        raise CheckpointError(f"{at}: peft_type is {kind!r}; this converter knows LORA")
    for key, why in REFUSED.items():
        if config.get(key):
            raise CheckpointError(f"{at}: {key} is {config[key]!r:.80}: {why}")
    if (init := config.get("init_lora_weights")) not in PLAIN:
        raise CheckpointError(
            f"{at}: init_lora_weights is {init!r}, which changes the model's own weights, too; have PEFT "
            "convert it to a plain LoRA (path_initial_model_for_weight_conversion), or merge it"
        )
    if not is_positive(alpha := config.get("lora_alpha")):
        raise CheckpointError(f"{at}: lora_alpha must be a positive number, got {alpha!r}")


def _rules(base: ModelConfig) -> dict[str, tuple[str, Rule]]:
    """Name in the text model of each module that llama.cpp can adapt -> the tensor's name in the GGUF, and
    its rule."""
    found = {}
    for source, target, rule in expected_tensors(base, "", range(base.n_layers), has_mtp=False):
        if rule.compute is None and len(rule.shape(base)) == 2 and not rule.per_expert:
            found[source.removesuffix(".weight")] = target, rule
    if base.tied_embeddings:  # one tensor in the GGUF, so an adapter of the head would change both
        del found[EMBEDDING.source.removesuffix(".weight")]
    return found


def _unknown(module: str, base: ModelConfig) -> str:
    """Why there is no rule for a module."""
    name = PREFIX.sub("", module)
    if base.tied_embeddings and f"{name}.weight" in (EMBEDDING.source, OUTPUT.source):
        return (
            f"{module} has an adapter, and the model's embedding and head are one tensor, of which llama.cpp "
            "adapts neither; merge it into the checkpoint"
        )
    if "experts" in name:
        return f"{module} has an adapter: routed experts are not adapted; merge it into the checkpoint"
    if (layer := re.match(r"layers\.(\d+)\.", name)) and int(layer[1]) >= base.n_layers:
        return f"{module} has an adapter, and the model has {base.n_layers} layers: it is another model's"
    return (
        f"{module} has an adapter, and the model (--base) has no such matrix that llama.cpp adapts: "
        "those are the linear layers of its trunk"
    )


def _pairs(weights: Path) -> dict[str, tuple[StoredTensor, StoredTensor]]:
    """Each module's A and B, in the file's order."""
    parts: dict[str, dict[str, StoredTensor]] = {}
    for tensor in read_header(weights):
        if tensor.name.endswith(BASE_LAYER):
            continue
        if (found := NAME.fullmatch(tensor.name)) is None:
            raise CheckpointError(
                f"{weights}: tensor {tensor.name} is neither A nor B of an adapter; what was trained whole "
                "is merged into the checkpoint"
            )
        check_weight_type(tensor)
        parts.setdefault(found["module"], {})[found["part"]] = tensor
    for module, pair in parts.items():
        if len(pair) != 2:
            raise CheckpointError(f"{weights}: {module} has no lora_{'A' if 'B' in pair else 'B'}")
    return {module: (pair["A"], pair["B"]) for module, pair in parts.items()}


def _factor(config: Mapping[str, Any], module: str, rank: int) -> float:
    """The factor for a module's B, in addition to alpha / rank (`LoraLayer.update_layer` and
    `get_pattern_key` of PEFT)."""
    alpha = config["lora_alpha"]
    for pattern, own in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = own
            break
    if not is_positive(alpha):
        raise CheckpointError(f"{CONFIG}: alpha_pattern has {alpha!r} for {module}; want a positive number")
    scale = alpha / sqrt(rank) if config.get("use_rslora") else alpha / rank
    return float(scale / (config["lora_alpha"] / rank))


def _planned(
    a: StoredTensor,
    b: StoredTensor,
    target: str,
    rule: Rule,
    base: ModelConfig,
    factor: float,
    outtype: FloatType,
) -> Iterator[PlannedTensor]:
    """A and B in llama.cpp's layout. Raises CheckpointError if they do not fit the matrix."""
    rows, columns = rule.shape(base)
    is_embedding = rule is EMBEDDING
    # an embedding's A has a column for each token, and its B turns them into rows
    wanted = (columns, rows) if is_embedding else (rows, columns)
    fits = len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1] > 0
    if not fits or (b.shape[0], a.shape[1]) != wanted:
        raise CheckpointError(
            f"{a.path}: {a.name} has shape {list(a.shape)}, {b.name} {list(b.shape)}; for the model's matrix "
            f"(--base) it must be [rank, {wanted[1]}] and [{wanted[0]}, rank]: is it another model's?"
        )
    of_columns = rule.reorder is tile_columns
    reorder_a = _transposed if is_embedding else rule.reorder if of_columns else None
    shape_a = a.shape[::-1] if is_embedding else a.shape
    scaled = None if factor == 1 else partial(_scaled, factor=factor)
    yield PlannedTensor(f"{target}.lora_a", a, shape_a, outtype, reorder_a, None)
    reorder_b = None if of_columns else rule.reorder
    yield PlannedTensor(f"{target}.lora_b", b, b.shape, outtype, reorder_b, scaled)


def _transposed(values: Array, config: ModelConfig) -> Array:
    return values.T


def _scaled(values: Array, config: ModelConfig, factor: float) -> Array:
    return values * np.float32(factor)
