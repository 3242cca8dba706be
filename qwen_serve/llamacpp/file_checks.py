"""Checks of a GGUF's types, shapes and keys against each other, before llama.cpp reads it.

llama.cpp names many problems of a model itself. But it trusts types of tensors, the keys of adapters and
vision towers, and a tower's shapes, and aborts the process if they are wrong (`GGML_ASSERT`). It also ignores
what a file has too much of, such as layers. All functions raise ModelLoadError, which names file and tensor
or key.
"""

import ctypes
import re
from collections.abc import Iterator, Mapping
from math import isqrt

import numpy as np

from . import ggml
from .devices import is_quantized, type_name
from .errors import ModelLoadError
from .gguf import I64, Header, Metadata, TensorInfo

F32, F16, BF16 = 0, 1, 30
FLOATS = (F32, F16, BF16)
Q8_1, Q8_K = 9, 15
NO_WEIGHTS = (Q8_1, Q8_K)
"""Types of intermediate results, which no product takes for weights."""
ALWAYS_F32 = re.compile(r"ssm_conv1d\.weight$|\.(scale|input_scale)$")
STRING, BOOL, UNSIGNED, FLOAT = "string", "bool", "u32", "f32"
NUMBERS, BOOLS = "[f32]", "[bool]"

GENERAL = {
    **dict.fromkeys(("file_type", "quantization_version", "alignment"), UNSIGNED),
    **dict.fromkeys(("architecture", "type", "name", "basename", "description", "size_label"), STRING),
    **dict.fromkeys(("author", "organization", "version", "finetune", "license", "url"), STRING),
}
"""Keys under `general.`."""

MODEL_KEYS = {
    **dict.fromkeys(
        ("context_length", "block_count", "embedding_length", "full_attention_interval"), UNSIGNED
    ),
    **dict.fromkeys(("rope.freq_base", "attention.layer_norm_rms_epsilon"), FLOAT),
    "rope.dimension_count": UNSIGNED,
}
"""Keys under the architecture's name. Without some of them llama.cpp computes something else."""
MODEL_NEEDS = ("rope.freq_base", "rope.dimension_count", "attention.layer_norm_rms_epsilon")
TOKENIZER_KEYS = {
    **dict.fromkeys(("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.chat_template"), STRING),
    **dict.fromkeys(("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"), BOOL),
    **dict.fromkeys(("tokenizer.ggml.tokens", "tokenizer.ggml.merges"), "[string]"),
    "tokenizer.ggml.token_type": "[i32]",
    "tokenizer.ggml.scores": "[f32]",
}

NORMS = ("attn_norm.weight", "post_attention_norm.weight")
FULL = tuple(f"attn_{name}.weight" for name in ("q", "k", "v", "output", "q_norm", "k_norm"))
FUSED = ("attn_qkv.weight", *FULL[3:])
RECURRENT = (
    *(f"attn_{name}.weight" for name in ("qkv", "gate")),
    *(f"ssm_{name}.weight" for name in ("alpha", "beta", "conv1d", "norm", "out")),
    "ssm_dt.bias",
    "ssm_a",
)
NEXTN = tuple(f"nextn.{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "shared_head_norm"))
"""Tensors of a block, without its FFN. llama.cpp misses some only when it computes, or not at all."""

TOWER_NAMES = ("v.", "mm.")
"""Beginnings of the names of a vision tower's tensors."""
TOWER_KEYS = {
    "clip.has_vision_encoder": BOOL,
    "clip.has_audio_encoder": BOOL,
    "clip.projector_type": STRING,
    "clip.vision.projector_type": STRING,
    "clip.use_gelu": BOOL,
    "clip.use_silu": BOOL,
    "clip.vision.embedding_length": UNSIGNED,
    "clip.vision.attention.head_count": UNSIGNED,
    "clip.vision.attention.head_count_kv": UNSIGNED,
    "clip.vision.attention.layer_norm_epsilon": FLOAT,
    "clip.vision.attention.key_length": UNSIGNED,
    "clip.vision.feed_forward_length": UNSIGNED,
    "clip.vision.block_count": UNSIGNED,
    "clip.vision.projection_dim": UNSIGNED,
    "clip.vision.image_size": UNSIGNED,
    "clip.vision.patch_size": UNSIGNED,
    "clip.vision.spatial_merge_size": UNSIGNED,
    "clip.vision.image_mean": NUMBERS,
    "clip.vision.image_std": NUMBERS,
    "clip.vision.is_deepstack_layers": BOOLS,
}
"""Keys that clip.cpp reads of a Qwen3.5 tower, by their only possible types."""
TOWER_NEEDS = (
    "clip.has_vision_encoder",
    "clip.use_gelu",
    "clip.vision.attention.layer_norm_epsilon",
    "clip.vision.block_count",
    "clip.vision.image_mean",
    "clip.vision.image_size",
    "clip.vision.image_std",
)
CHANNELS, MERGE = 3, 2

_validate_row_data = ggml.declare(
    "ggml_validate_row_data", ctypes.c_bool, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
)

ADAPTER_KEYS = {
    "adapter.type": STRING,
    "adapter.lora.alpha": FLOAT,
    "adapter.lora.task_name": STRING,
    "adapter.lora.prompt_prefix": STRING,
}


def check_model(header: Header) -> None:
    """Checks the keys of a Qwen3.5, the types of its tensors, and that every block is whole."""
    arch = str(header.metadata.get("general.architecture"))
    _check_kinds(header, {f"{arch}.{key}": kind for key, kind in MODEL_KEYS.items()} | TOKENIZER_KEYS)
    _check_kinds(header, {f"{arch}.{key}": MODEL_KEYS[key] for key in MODEL_NEEDS}, needed=True)
    check_types(header)
    if foreign := next((name for name in header.tensors if name.startswith(TOWER_NAMES)), None):
        raise ModelLoadError(
            f"{header.name}: has tensor {foreign}: a model and its vision tower in one file, as Ollama keeps "
            "them. llama.cpp wants two; take the GGUF and the mmproj of the model's page, or convert the "
            "checkpoint"
        )
    metadata = Metadata(header, arch)
    n_blocks, n_mtp = metadata.integer("block_count", least=1), metadata.integer("nextn_predict_layers", 0)
    for i in range(n_blocks):
        is_mtp = i >= n_blocks - n_mtp
        recurrent = f"blk.{i}.{RECURRENT[-1]}" in header.tensors
        full = FUSED if f"blk.{i}.{FUSED[0]}" in header.tensors else FULL
        for name in (*NORMS, *(RECURRENT if recurrent else full), *(NEXTN if is_mtp else ())):
            if f"blk.{i}.{name}" not in header.tensors:
                of = "the block that predicts further tokens" if is_mtp else f"layer {i}"
                raise ModelLoadError(
                    f"{header.name}: there is no tensor blk.{i}.{name}; by block_count {n_blocks} and "
                    f"nextn_predict_layers {n_mtp} it belongs to {of}"
                )


def check_types(header: Header) -> None:
    """Checks the general keys and the types of a model's or a block drafter's tensors."""
    _check_kinds(header, {})
    for tensor in header.tensors.values():
        _check_type(header, tensor)


def check_adapter(header: Header) -> None:
    """Checks a LoRA adapter's keys and the types and values of its tensors."""
    _check_kinds(header, ADAPTER_KEYS)
    _check_kinds(header, {"adapter.lora.alpha": FLOAT}, needed=True)
    alpha = header.metadata["adapter.lora.alpha"]
    if not isinstance(alpha, float) or not np.isfinite(alpha):
        raise ModelLoadError(f"{header.name}: adapter.lora.alpha is {alpha}; it must be a finite number")
    for tensor in header.tensors.values():
        _check_type(header, tensor)
        _check_finite(header, tensor)


def check_tower(header: Header) -> None:
    """Checks a vision tower's keys, and the names, types, shapes and values of its tensors."""
    _check_kinds(header, TOWER_KEYS)
    _check_kinds(header, {key: TOWER_KEYS[key] for key in TOWER_NEEDS}, needed=True)
    if header.metadata["clip.has_vision_encoder"] is not True:
        raise ModelLoadError(f"{header.name}: clip.has_vision_encoder is false: there is no vision tower")
    if header.metadata["clip.use_gelu"] is not True:
        raise ModelLoadError(f"{header.name}: clip.use_gelu is false; Qwen3.5's towers compute with GELU")
    metadata = Metadata(header, "clip.vision")
    for key, positive in (("image_mean", False), ("image_std", True)):
        values = metadata.get(key)
        ok = isinstance(values, tuple) and len(values) == CHANNELS
        ok = ok and all(isinstance(v, float) and np.isfinite(v) and (v > 0 or not positive) for v in values)  # type: ignore[union-attr]
        metadata.relate(key, bool(ok), f"{CHANNELS} {'positive ' if positive else ''}numbers")
    eps = metadata.get("attention.layer_norm_epsilon")
    metadata.relate(
        "attention.layer_norm_epsilon", isinstance(eps, float) and 0 < eps < 1, "a number from 0 to 1"
    )
    merge = metadata.integer("spatial_merge_size", MERGE)
    metadata.relate("spatial_merge_size", merge == MERGE, str(MERGE))
    layers = metadata.get("is_deepstack_layers") or ()
    metadata.relate("is_deepstack_layers", not any(layers) if isinstance(layers, tuple) else False, "false")
    wanted = dict(_tower(metadata, header))
    for name, shape in wanted.items():
        if (tensor := header.tensors.get(name)) is None:
            raise ModelLoadError(f"{header.name}: there is no tensor {name}")
        if _trimmed(tensor.shape) != _trimmed(shape):
            raise ModelLoadError(
                f"{header.name}: tensor {name} is {list(tensor.shape)}; by the metadata it must be "
                f"{list(shape)} (the row's length first)"
            )
        _check_type(header, tensor, floats=name.startswith(("v.patch_embd", "v.position_embd")))
        _check_finite(header, tensor)
    if unknown := [name for name in header.tensors if name not in wanted]:
        raise ModelLoadError(
            f"{header.name}: tensor {unknown[0]} has no place in a tower of {metadata.get('block_count')} "
            "layers, clip.vision.block_count"
        )


def _tower(metadata: Metadata, header: Header) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape, the row's length first, of every tensor that clip.cpp reads."""
    wide = metadata.integer("embedding_length", least=1, most=1 << 16)
    heads = metadata.integer("attention.head_count", least=1, most=wide)
    # a head's elements rotate by row and by column, in pairs
    metadata.relate("attention.head_count", wide % (4 * heads) == 0, f"a divisor of {wide // 4}")
    ffn = metadata.integer("feed_forward_length", least=1, most=1 << 16)
    out = metadata.integer("projection_dim", least=1, most=1 << 20)
    patch = metadata.integer("patch_size", least=1, most=1024)
    side = metadata.integer("image_size", least=patch, most=1 << 16)
    positions = header.tensors.get("v.position_embd.weight")
    count = positions.shape[1] if positions is not None and len(positions.shape) > 1 else 0
    metadata.relate(
        "image_size",
        side % patch == 0 and isqrt(count) ** 2 == count and count == (side // patch) ** 2,
        f"{isqrt(count) * patch}, as many patches along a side as v.position_embd.weight has rows",
    )
    merged = wide * MERGE**2
    yield "v.position_embd.weight", (wide, count)
    yield "v.patch_embd.weight", (patch, patch, CHANNELS, wide)
    yield "v.patch_embd.weight.1", (patch, patch, CHANNELS, wide)
    yield "v.patch_embd.bias", (wide,)
    blocks: list[tuple[str, tuple[int, ...]]] = [
        (f"v.blk.{i}.{name}", shape)
        for i in range(metadata.integer("block_count", least=1, most=512))
        for name, shape in (
            ("ln1", (wide,)),
            ("attn_qkv", (wide, 3 * wide)),
            ("attn_out", (wide, wide)),
            ("ln2", (wide,)),
            ("ffn_up", (wide, ffn)),
            ("ffn_down", (ffn, wide)),
        )
    ]
    blocks += [("v.post_ln", (wide,)), ("mm.0", (merged, merged)), ("mm.2", (merged, out))]
    for name, shape in blocks:
        yield f"{name}.weight", shape
        yield f"{name}.bias", shape[-1:]


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without the ones at the end, which ggml does not tell from none."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _check_kinds(header: Header, kinds: Mapping[str, str], *, needed: bool = False) -> None:
    general = {f"general.{key}": kind for key, kind in GENERAL.items()}
    for key, kind in (kinds if needed else general | dict(kinds)).items():
        if (given := header.kinds.get(key, "missing" if needed else kind)) != kind:
            raise ModelLoadError(f"{header.name}: its metadata has {key} as {given}; it must be {kind}")


def _check_type(header: Header, tensor: TensorInfo, *, floats: bool = False) -> None:
    """Vectors are F32, matrices floats (with `floats`) or of a type that products take for weights."""
    if tensor.type == I64 and tensor.name == "d2t":
        return
    if (len(_trimmed(tensor.shape)) == 1 and len(tensor.shape) == 1) or ALWAYS_F32.search(tensor.name):
        allowed, wanted = tensor.type == F32, "F32"
    else:
        weights = is_quantized(tensor.type) and tensor.type not in NO_WEIGHTS
        allowed = tensor.type in FLOATS or (weights and not floats)
        wanted = "F32, F16 or BF16" + ("" if floats else ", or quantized")
    if not allowed:
        raise ModelLoadError(
            f"{header.name}: tensor {tensor.name} is {type_name(tensor.type)}; it must be {wanted}"
        )


def _check_finite(header: Header, tensor: TensorInfo) -> None:
    """Reads a tensor's floats, or the scales of its blocks."""
    data = np.memmap(header.path, np.uint8, "r", tensor.offset, tensor.n_bytes)
    if not _validate_row_data(tensor.type, data.ctypes.data, data.nbytes):
        raise ModelLoadError(
            f"{header.name}: tensor {tensor.name} holds values that are not finite: the file is damaged, or "
            "the training that wrote it diverged"
        )
