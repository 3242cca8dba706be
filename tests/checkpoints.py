"""Random checkpoints of the official Qwen3.5 layout, small enough to write in milliseconds."""

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from qwen_serve.convert.floats import convert
from qwen_serve.convert.safetensors import write_file

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 4, 2, 32
EXPERTS, EXPERTS_USED, EXPERT_FFN, SHARED_FFN = 6, 2, 32, 96
KEY_HEADS, VALUE_HEADS, LINEAR_DIM, CONV = 2, 6, 32, 4  # three value heads a key head: an order of its own
VISION_HIDDEN, VISION_FFN, VISION_DEPTH, PATCH, POSITIONS = 32, 80, 2, 4, 36  # rows of 80: no whole blocks
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_size": 2,
    "patch_size": PATCH,
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "temporal_patch_size": 2,
}
VOCAB = 320
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN_ADDED = ("<think>", "</think>", "<|looks_special|>")
MERGES = (("t", "h"), ("th", "e"), ("Ġ", "the"))
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"

Layout = Literal["fused", "per-expert", "per-expert MTP"]
"""How routed experts are stored: all in one tensor, one by one, or the latter in the MTP block alone."""
Tensor = tuple[str, str, npt.NDArray[Any]]


def write_checkpoint(
    folder: Path,
    *,
    layers: int = 8,
    mtp: bool = True,
    mtp_embedding: bool = False,
    tied: bool = True,
    nested: bool = True,
    experts: Layout | None = None,
    vision: bool = False,
    head_copy: bool = False,
    dtype: str = "BF16",
    seed: int = 0,
) -> Path:
    """Writes two shards, index, config, tokenizer and generation config; returns `folder`.

    `nested` is the official Qwen3_5ForConditionalGeneration, a vision tower beside the text model; without
    it the text model stands alone, as Qwen3_5ForCausalLM. With `experts` it is a Qwen3_5Moe. With `vision`
    the tower is a whole one, and a preprocessor configuration makes it usable. `head_copy` stores the tied
    embedding twice.
    """
    folder.mkdir(parents=True, exist_ok=True)
    prefix = "model.language_model." if nested else "model."
    in_trunk = "fused" if experts == "per-expert MTP" else experts
    tensors = [*_text_tensors(prefix, layers, dtype, seed, in_trunk)]
    if not tied:
        tensors.append(_matrix("lm_head.weight", (VOCAB, HIDDEN), dtype, seed))
    if head_copy:
        tensors.append(("lm_head.weight", dtype, tensors[0][2]))
    if mtp:
        tensors += _mtp_tensors(dtype, seed, experts)
    if mtp_embedding:
        tensors.append(_matrix("mtp.embed_tokens.weight", (VOCAB, HIDDEN), dtype, seed))
    if vision:
        tensors += _vision_tensors(dtype, seed)
    elif nested:
        tensors += [_matrix("model.visual.patch_embed.proj.weight", (8, 3, 2, 2, 2), dtype, seed)]
    _write_shards(folder, tensors)
    _write_json(folder / "config.json", model_config(layers, mtp, tied, nested, experts is not None))
    if vision:
        edit_json(folder / "config.json", vision_config=vision_config(experts is not None))
        _write_json(folder / "preprocessor_config.json", PREPROCESSOR)
    _write_json(folder / "generation_config.json", {"temperature": 0.7, "top_p": 0.8, "top_k": 20})
    write_tokenizer(folder)
    return folder


def set_tied(folder: Path, outer: bool | None, inner: bool | None) -> Path:
    """Sets `tie_word_embeddings` on both levels, or on the inner one of a text model; None removes it."""
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config")
    for level, value in [(config, inner)] if text is None else [(config, outer), (text, inner)]:
        level.pop("tie_word_embeddings", None)
        if value is not None:
            level["tie_word_embeddings"] = value
    _write_json(folder / "config.json", config)
    return folder


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE of 256 bytes, three merges and six added tokens; ids 265 and up have no token."""
    vocab = {symbol: id_ for id_, symbol in enumerate(_byte_symbols())}
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    names = (*SPECIAL, *PLAIN_ADDED)
    added = [_added(len(vocab) + i, name, name in SPECIAL) for i, name in enumerate(names)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": [list(pair) for pair in MERGES]},
    }
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "add_bos_token": False,
        "added_tokens_decoder": {
            str(entry["id"]): {key: value for key, value in entry.items() if key != "id"} for entry in added
        },
        "chat_template": TEMPLATE,
    }
    _write_json(folder / "tokenizer.json", tokenizer)
    _write_json(folder / "tokenizer_config.json", settings)


def edit_json(path: Path, **changes: Any) -> None:
    """Replaces top-level keys of a JSON file."""
    _write_json(path, json.loads(path.read_text(encoding="utf-8")) | changes)


def _text_tensors(prefix: str, layers: int, dtype: str, seed: int, experts: Layout | None) -> list[Tensor]:
    tensors = [
        _matrix(f"{prefix}embed_tokens.weight", (VOCAB, HIDDEN), dtype, seed),
        _matrix(f"{prefix}norm.weight", (HIDDEN,), dtype, seed),
    ]
    for layer in range(layers):
        attention = _full_attention if layer % 4 == 3 else _linear_attention
        tensors += _block(f"{prefix}layers.{layer}.", dtype, seed, experts)
        tensors += attention(f"{prefix}layers.{layer}.", dtype, seed)
    return tensors


def _mtp_tensors(dtype: str, seed: int, experts: Layout | None) -> list[Tensor]:
    norms = ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight")
    return [
        _matrix("mtp.fc.weight", (HIDDEN, 2 * HIDDEN), dtype, seed),
        *(_matrix(name, (HIDDEN,), dtype, seed) for name in norms),
        *_block("mtp.layers.0.", dtype, seed, experts),
        *_full_attention("mtp.layers.0.", dtype, seed),
    ]


def _block(prefix: str, dtype: str, seed: int, experts: Layout | None) -> list[Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    if experts is None:
        shapes |= _ffn("mlp.", FFN)
    else:
        shapes |= {"mlp.gate.weight": (EXPERTS, HIDDEN), "mlp.shared_expert_gate.weight": (1, HIDDEN)}
        shapes |= _ffn("mlp.shared_expert.", SHARED_FFN)
        if experts == "fused":
            shapes["mlp.experts.gate_up_proj"] = (EXPERTS, 2 * EXPERT_FFN, HIDDEN)
            shapes["mlp.experts.down_proj"] = (EXPERTS, HIDDEN, EXPERT_FFN)
        else:
            for expert in range(EXPERTS):
                shapes |= _ffn(f"mlp.experts.{expert}.", EXPERT_FFN)
    return [_matrix(f"{prefix}{name}", shape, dtype, seed) for name, shape in shapes.items()]


def _ffn(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (width, HIDDEN),
        f"{prefix}up_proj.weight": (width, HIDDEN),
        f"{prefix}down_proj.weight": (HIDDEN, width),
    }


def _full_attention(prefix: str, dtype: str, seed: int) -> list[Tensor]:
    shapes = {
        "q_proj": (2 * HEADS * HEAD_DIM, HIDDEN),
        "k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "q_norm": (HEAD_DIM,),
        "k_norm": (HEAD_DIM,),
    }
    return [_matrix(f"{prefix}self_attn.{name}.weight", s, dtype, seed) for name, s in shapes.items()]


def _linear_attention(prefix: str, dtype: str, seed: int) -> list[Tensor]:
    value_dim = VALUE_HEADS * LINEAR_DIM
    channels = 2 * KEY_HEADS * LINEAR_DIM + value_dim
    matrices = {
        "in_proj_qkv.weight": (channels, HIDDEN),
        "in_proj_z.weight": (value_dim, HIDDEN),
        "in_proj_b.weight": (VALUE_HEADS, HIDDEN),
        "in_proj_a.weight": (VALUE_HEADS, HIDDEN),
        "conv1d.weight": (channels, 1, CONV),
        "dt_bias": (VALUE_HEADS,),
        "out_proj.weight": (HIDDEN, value_dim),
    }
    return [
        *(_matrix(f"{prefix}linear_attn.{name}", shape, dtype, seed) for name, shape in matrices.items()),
        # in F32 as official checkpoints have them
        _matrix(f"{prefix}linear_attn.A_log", (VALUE_HEADS,), "F32", seed),
        _matrix(f"{prefix}linear_attn.norm.weight", (LINEAR_DIM,), "F32", seed),
    ]


def _vision_tensors(dtype: str, seed: int) -> list[Tensor]:
    wide, merged = VISION_HIDDEN, 4 * VISION_HIDDEN
    layers: dict[str, tuple[int, ...]] = {
        "patch_embed.proj": (wide, 3, 2, PATCH, PATCH),
        "merger.norm": (wide,),
        "merger.linear_fc1": (merged, merged),
        "merger.linear_fc2": (HIDDEN, merged),
    }
    for i in range(VISION_DEPTH):
        layers |= {
            f"blocks.{i}.norm1": (wide,),
            f"blocks.{i}.attn.qkv": (3 * wide, wide),
            f"blocks.{i}.attn.proj": (wide, wide),
            f"blocks.{i}.norm2": (wide,),
            f"blocks.{i}.mlp.linear_fc1": (VISION_FFN, wide),
            f"blocks.{i}.mlp.linear_fc2": (wide, VISION_FFN),
        }
    shapes = {f"{name}.weight": shape for name, shape in layers.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in layers.items()}
    shapes["pos_embed.weight"] = (POSITIONS, wide)
    return [_matrix(f"model.visual.{name}", shape, dtype, seed) for name, shape in shapes.items()]


def vision_config(experts: bool = False) -> dict[str, Any]:
    """The `vision_config` of a checkpoint with a vision tower."""
    return {
        "model_type": "qwen3_5_moe" if experts else "qwen3_5",
        "deepstack_visual_indexes": [],
        "depth": VISION_DEPTH,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": VISION_HIDDEN,
        "in_channels": 3,
        "intermediate_size": VISION_FFN,
        "num_heads": 2,
        "num_position_embeddings": POSITIONS,
        "out_hidden_size": HIDDEN,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def _matrix(name: str, shape: tuple[int, ...], dtype: str, seed: int) -> Tensor:
    """Values depend on the name, so all tensors differ."""
    generator = np.random.default_rng([seed, *name.encode()])
    values = generator.standard_normal(shape, dtype=np.float32) / np.float32(8)
    return name, dtype, convert(values, "F32", dtype)


def _write_shards(folder: Path, tensors: list[Tensor]) -> None:
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    half = len(tensors) // 2
    parts = [tensors[:half], tensors[half:]]
    for name, part in zip(names, parts, strict=True):
        write_file(folder / name, part, {"format": "pt"})
    weight_map = {t[0]: name for name, part in zip(names, parts, strict=True) for t in part}
    total = sum(t[2].nbytes for t in tensors)
    _write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )


def model_config(
    layers: int = 8,
    mtp: bool = True,
    tied: bool = True,
    nested: bool = True,
    experts: bool = False,
    **text_changes: Any,
) -> dict[str, Any]:
    """A parsed `config.json`; `text_changes` replace fields of the text model."""
    family, model_type = ("Qwen3_5Moe", "qwen3_5_moe") if experts else ("Qwen3_5", "qwen3_5")
    widths = {
        "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_USED,
        "moe_intermediate_size": EXPERT_FFN,
        "shared_expert_intermediate_size": SHARED_FFN,
    }
    text = {
        "model_type": f"{model_type}_text",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        **(widths if experts else {"intermediate_size": FFN}),
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "full_attention_interval": 4,
        "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
        "linear_conv_kernel_dim": CONV,
        "linear_key_head_dim": LINEAR_DIM,
        "linear_value_head_dim": LINEAR_DIM,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "max_position_embeddings": 4096,
        "mtp_num_hidden_layers": int(mtp),
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": tied,
        "eos_token_id": 256 + len(MERGES),
        **text_changes,
    }
    if not nested:
        return {"architectures": [f"{family}ForCausalLM"], **text}
    return {
        "architectures": [f"{family}ForConditionalGeneration"],
        "model_type": model_type,
        "text_config": text,
        "vision_config": {"model_type": model_type, "depth": 1},
        "tie_word_embeddings": tied,
    }


def _added(id_: int, content: str, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": id_, "content": content, "special": special, **flags}


def _byte_symbols() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    symbol = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(rest)}
    return [symbol[byte] for byte in range(256)]


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
