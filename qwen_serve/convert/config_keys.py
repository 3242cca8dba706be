"""The keys of a `config.json` that the conversion reads, that must have one value, and that have no effect.

Any other key that enables something is refused, since a model that computes something else than intended is
worse than none. Sources: transformers' configurations of qwen3_5 and qwen3_5_moe, and llama.cpp's
src/models/qwen35.cpp and qwen35moe.cpp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qwen_serve.convert.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

READ = frozenset(
    [
        "architectures",
        "full_attention_interval",
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_value_head_dim",
        "max_position_embeddings",
        "moe_intermediate_size",
        "mtp_num_hidden_layers",
        "num_attention_heads",
        "num_experts",
        "num_experts_per_tok",
        "num_hidden_layers",
        "num_key_value_heads",
        "partial_rotary_factor",
        "quantization_config",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "shared_expert_intermediate_size",
        "text_config",
        "tie_word_embeddings",
        "vocab_size",
    ]
)

FIXED: dict[str, Any] = {
    "attention_bias": False,
    "attn_output_gate": True,
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "mlp_only_layers": [],
    "mtp_use_dedicated_embeddings": False,
    "norm_topk_prob": True,
    "output_gate_type": "swish",
}
"""Keys whose value llama.cpp does not read: it always computes this."""

HARMLESS = frozenset(
    [
        "attention_dropout",
        "auto_map",
        "chunk_size_feed_forward",
        "dtype",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "language_model_only",
        "mamba_ssm_dtype",
        "model_type",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "problem_type",
        "return_dict",
        "router_aux_loss_coef",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "vision_config",
    ]
)
"""Keys about training, programming and pictures."""

ROPE_READ = frozenset(
    [
        "attention_factor",
        "factor",
        "mrope_section",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rope_theta",
        "rope_type",
        "type",
    ]
)
ROPE_HARMLESS = frozenset(["mrope_interleaved"])
"""Keys without effect on text, which has one position a token; the order of sections matters for pictures
only."""

YARN_FIXED: dict[str, Any] = {
    "beta_fast": 32,
    "beta_slow": 1,
    "extrapolation_factor": 1,
    "truncate": True,
}
"""llama.cpp has keys for the first three, but does not read them for this architecture."""


def check_config(config: Mapping[str, Any]) -> None:
    """Checks a parsed `config.json` and its `text_config`.

    Raises: CheckpointError: a key that changes the model in a way that llama.cpp, or this converter, does not
    support.
    """
    for values in (config, config.get("text_config", {})):
        for key, value in values.items():
            if key in FIXED:
                _check_fixed(key, value, FIXED[key])
            elif key not in READ | HARMLESS and not key.endswith(("_token_id", "_token_index")):
                _check_unknown(key, value)


def check_rope(rope: Mapping[str, Any]) -> None:
    """Checks `rope_parameters`. Raises: CheckpointError, as `check_config`."""
    fixed = YARN_FIXED if rope["rope_type"] == "yarn" else {}
    for key, value in rope.items():
        name = f"rope_parameters.{key}"
        if key in fixed:
            _check_fixed(name, value, fixed[key])
        elif key not in ROPE_READ | ROPE_HARMLESS:
            _check_unknown(name, value)


def _check_fixed(name: str, value: Any, computed: Any) -> None:
    if value is not None and value != computed:
        raise CheckpointError(
            f"config.json: {name} is {value!r}; llama.cpp computes Qwen3.5 with {computed!r} whatever is said"
        )


def _check_unknown(name: str, value: Any) -> None:
    """Raises CheckpointError for an unknown key, unless it is off, empty, or a tool's note by its prefix."""
    if value and not name.startswith(("_", "unsloth")):
        raise CheckpointError(
            f"config.json: {name} is {value!r}, which this converter does not know; "
            "if the model computes the same without it, remove it"
        )
