"""The nano model's shape, and the JSON files of its checkpoint.

Field names and nesting are those of the official Qwen3.5 repositories, so any reader of those reads this.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from models.nano.train.tokenizer import SPECIAL_TOKENS


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3.5 text model. Every row length is a multiple of 256, as k-quants need."""

    vocab_size: int = 3_712
    hidden: int = 256
    layers: int = 8
    full_attention_interval: int = 4
    ffn: int = 512
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    linear_key_heads: int = 2
    linear_value_heads: int = 4
    linear_head_dim: int = 64
    conv_kernel: int = 4
    rope_theta: float = 10_000_000.0
    partial_rotary: float = 0.25
    norm_eps: float = 1e-6
    context: int = 32_768

    @property
    def key_dim(self) -> int:
        return self.linear_key_heads * self.linear_head_dim

    @property
    def value_dim(self) -> int:
        return self.linear_value_heads * self.linear_head_dim

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary)

    def is_full_attention(self, layer: int) -> bool:
        return (layer + 1) % self.full_attention_interval == 0

    def layer_type(self, layer: int) -> str:
        return "full_attention" if self.is_full_attention(layer) else "linear_attention"

    def with_sizes(self, text: str) -> Shape:
        """This shape with other whole numbers, as in `hidden=512,layers=4`. Raises ValueError."""
        known = [field.name for field in fields(self) if isinstance(field.default, int)]
        sizes = {}
        for part in text.split(","):
            name, _, number = part.partition("=")
            if name not in known or not number.isdecimal() or not int(number):
                raise ValueError(f"{part!r}: want SIZE=NUMBER, of {', '.join(known)}")
            sizes[name] = int(number)
        return replace(self, **sizes)


@dataclass(frozen=True)
class VisionShape:
    """Sizes of Qwen3.5's vision tower. A token is 16 pixels wide and high, a head turns in pairs of 4."""

    depth: int = 4
    hidden: int = 96
    ffn: int = 384
    heads: int = 4
    patch: int = 8
    temporal_patch: int = 2
    merge: int = 2
    positions: int = 64


def model_config(shape: Shape, vision: VisionShape, ids: dict[str, int]) -> dict[str, Any]:
    """config.json; `ids` maps the text of each special token to its id."""
    rotary_pairs = shape.rotary_dim // 2
    section = [(rotary_pairs + 2) // 3, (rotary_pairs + 1) // 3, rotary_pairs // 3]
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": ids["<|image_pad|>"],
        "model_type": "qwen3_5",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "dtype": "bfloat16",
            "eos_token_id": ids["<|endoftext|>"],
            "full_attention_interval": shape.full_attention_interval,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "hidden_size": shape.hidden,
            "initializer_range": 0.02,
            "intermediate_size": shape.ffn,
            "layer_types": [shape.layer_type(i) for i in range(shape.layers)],
            "linear_conv_kernel_dim": shape.conv_kernel,
            "linear_key_head_dim": shape.linear_head_dim,
            "linear_num_key_heads": shape.linear_key_heads,
            "linear_num_value_heads": shape.linear_value_heads,
            "linear_value_head_dim": shape.linear_head_dim,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": shape.context,
            "mlp_only_layers": [],
            "model_type": "qwen3_5_text",
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "num_attention_heads": shape.heads,
            "num_hidden_layers": shape.layers,
            "num_key_value_heads": shape.kv_heads,
            "rms_norm_eps": shape.norm_eps,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": section,
                "partial_rotary_factor": shape.partial_rotary,
                "rope_theta": int(shape.rope_theta),
                "rope_type": "default",
            },
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": shape.vocab_size,
        },
        "tie_word_embeddings": True,
        "transformers_version": "4.57.0.dev0",
        "video_token_id": ids["<|video_pad|>"],
        "vision_config": vision_config(vision, shape.hidden),
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
    }


def vision_config(vision: VisionShape, out: int) -> dict[str, Any]:
    """`vision_config` of config.json; `out`: the text model's width."""
    return {
        "deepstack_visual_indexes": [],
        "depth": vision.depth,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": vision.hidden,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": vision.ffn,
        "model_type": "qwen3_5",
        "num_heads": vision.heads,
        "num_position_embeddings": vision.positions,
        "out_hidden_size": out,
        "patch_size": vision.patch,
        "spatial_merge_size": vision.merge,
        "temporal_patch_size": vision.temporal_patch,
    }


def preprocessor_config(vision: VisionShape) -> dict[str, Any]:
    """preprocessor_config.json: how pixels become what the tower reads. At least 8 tokens, at most 4,096."""
    token = (vision.patch * vision.merge) ** 2
    return {
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": vision.merge,
        "patch_size": vision.patch,
        "processor_class": "Qwen3VLProcessor",
        "size": {"longest_edge": 4096 * token, "shortest_edge": 8 * token},
        "temporal_patch_size": vision.temporal_patch,
    }


def shape_of(config: dict[str, Any]) -> Shape:
    """The shape that `model_config` wrote."""
    text = config["text_config"]
    return Shape(
        vocab_size=text["vocab_size"],
        hidden=text["hidden_size"],
        layers=text["num_hidden_layers"],
        full_attention_interval=text["full_attention_interval"],
        ffn=text["intermediate_size"],
        heads=text["num_attention_heads"],
        kv_heads=text["num_key_value_heads"],
        head_dim=text["head_dim"],
        linear_key_heads=text["linear_num_key_heads"],
        linear_value_heads=text["linear_num_value_heads"],
        linear_head_dim=text["linear_key_head_dim"],
        conv_kernel=text["linear_conv_kernel_dim"],
        rope_theta=float(text["rope_parameters"]["rope_theta"]),
        partial_rotary=text["rope_parameters"]["partial_rotary_factor"],
        norm_eps=text["rms_norm_eps"],
        context=text["max_position_embeddings"],
    )


def generation_config(ids: dict[str, int]) -> dict[str, Any]:
    """generation_config.json: the sampling that a client gets who asks for none."""
    return {
        "bos_token_id": ids["<|endoftext|>"],
        "do_sample": True,
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "pad_token_id": ids["<|endoftext|>"],
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "transformers_version": "4.57.0.dev0",
    }


def tokenizer_config(shape: Shape, ids: dict[str, int], regex: str) -> dict[str, Any]:
    """tokenizer_config.json; the chat template has its own file beside it."""
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(ids[text]): {
                "content": text,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": special,
            }
            for text, special in SPECIAL_TOKENS
        },
        "additional_special_tokens": [
            "<|im_start|>",
            "<|im_end|>",
            "<|object_ref_start|>",
            "<|object_ref_end|>",
            "<|box_start|>",
            "<|box_end|>",
            "<|quad_start|>",
            "<|quad_end|>",
            "<|vision_start|>",
            "<|vision_end|>",
            "<|vision_pad|>",
            "<|image_pad|>",
            "<|video_pad|>",
        ],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "image_token": "<|image_pad|>",
        "model_max_length": shape.context,
        "pad_token": "<|endoftext|>",
        "pretokenize_regex": regex,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    }
