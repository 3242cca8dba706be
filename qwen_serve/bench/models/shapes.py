"""Shapes of synthetic models, as `config.json` has them."""

from __future__ import annotations

from typing import Any

from qwen_serve.convert.config import FULL, LINEAR, ModelConfig
from qwen_serve.convert.vision import VisionConfig


def layer_types(layers: int) -> list[str]:
    """Every fourth layer is full attention."""
    return [LINEAR if (number + 1) % 4 else FULL for number in range(layers)]


def qwen35_4b() -> dict[str, Any]:
    """`config.json` of a model with the shapes of Qwen3.5-4B, without the vision tower."""
    text = {
        "model_type": "qwen3_5_text",
        "vocab_size": 248_320,
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "full_attention_interval": 4,
        "layer_types": layer_types(32),
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "max_position_embeddings": 262_144,
        "mtp_num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": {"model_type": "qwen3_5"},
        "tie_word_embeddings": True,
    }


def qwen35_9b() -> dict[str, Any]:
    """`config.json` of a model with the shapes of Qwen3.5-9B, without the vision tower."""
    config = qwen35_4b()
    config["tie_word_embeddings"] = False
    config["text_config"] |= {"hidden_size": 4096, "intermediate_size": 12_288, "tie_word_embeddings": False}
    return config


def qwen35_35b_a3b() -> dict[str, Any]:
    """`config.json` of a model with the shapes of Qwen3.5-35B-A3B, without the vision tower."""
    config = qwen35_4b()
    config["architectures"] = ["Qwen3_5MoeForConditionalGeneration"]
    config["model_type"] = config["vision_config"]["model_type"] = "qwen3_5_moe"
    config["tie_word_embeddings"] = False
    text = config["text_config"]
    del text["intermediate_size"]
    text |= {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "layer_types": layer_types(40),
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
    }
    return config


def qwen36_27b() -> dict[str, Any]:
    """`config.json` of a model with the shapes of Qwen3.6-27B (Qwen3.5's and 3.8's, too), without the vision
    tower."""
    config = qwen35_4b()
    config["tie_word_embeddings"] = False
    config["text_config"] |= {
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "layer_types": layer_types(64),
        "linear_num_value_heads": 48,
        "tie_word_embeddings": False,
    }
    return config


def small(config: dict[str, Any]) -> dict[str, Any]:
    """The same kind of model in a few megabytes, for tests; k-quants need rows of a multiple of 256."""
    text = config["text_config"]
    text |= {
        "vocab_size": 4096,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "layer_types": layer_types(4),
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    if "num_experts" in text:
        text |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
        text["shared_expert_intermediate_size"] = 768
    else:
        text["intermediate_size"] = 768
    text["rope_parameters"]["mrope_section"] = [3, 3, 2]
    return config


SHAPES = {
    "4b": ModelConfig.from_json(qwen35_4b()),
    "9b": ModelConfig.from_json(qwen35_9b()),
    "27b": ModelConfig.from_json(qwen36_27b()),
    "35b-a3b": ModelConfig.from_json(qwen35_35b_a3b()),
    "small": ModelConfig.from_json(small(qwen35_4b())),
    "small-moe": ModelConfig.from_json(small(qwen35_35b_a3b())),
}


def tower(name: str) -> VisionConfig:
    """The vision tower of a model of `SHAPES`: the 4B has a smaller one than larger models."""
    size = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}
    if name == "4b":
        size = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16}
    elif name.startswith("small"):
        size = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4}
    width = SHAPES[name].hidden_size
    config = {**size, "patch_size": 16, "num_position_embeddings": 48**2, "out_hidden_size": width}
    half = [0.5] * 3
    return VisionConfig.from_json(config, {"image_mean": half, "image_std": half}, width)
