"""The keys of a `config.json` that the conversion reads, that must have one value, and that have no effect.

A key that changes the computation is refused with its reason, since a model that computes something else than
intended is worse than none. Other keys are named, and ignored as in transformers. Sources: transformers'
configurations of qwen3_5 and qwen3_5_moe, and llama.cpp's src/models/qwen35.cpp and qwen35moe.cpp.
"""

from collections.abc import Mapping
from typing import Any

from qwen_serve.convert.errors import CheckpointError

READ = frozenset(
    [
        "architectures",
        "compression_config",
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
        "original_max_position_embeddings",
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

FIXED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    "decoder_sparse_step": (1,),
    "hidden_act": ("silu", "swish"),
    "mlp_only_layers": ([],),
    "mtp_use_dedicated_embeddings": (False,),
    "norm_topk_prob": (True,),
    "output_gate_type": ("swish", "silu"),
}
"""Keys whose value llama.cpp does not read: it always computes this. Of several names for one function, the
first is the usual one."""

_SCALED = "llama.cpp computes Qwen3.5 without such a factor"
_CAPPED = "llama.cpp computes Qwen3.5 without a cap"
_ROUTED = "llama.cpp chooses Qwen3.5's experts by a softmax over all of them, and adds one shared expert"
_WINDOW = "every layer of full attention sees the whole context"
_QWEN4 = "a part of Qwen4-Exp, which llama.cpp does not compute"
CHANGES = {
    "attention_multiplier": _SCALED,
    "embedding_multiplier": _SCALED,
    "logit_scale": _SCALED,
    "logits_scaling": _SCALED,
    "query_pre_attn_scalar": _SCALED,
    "residual_multiplier": _SCALED,
    "routed_scaling_factor": _SCALED,
    "scale_emb": _SCALED,
    "attn_logit_softcapping": _CAPPED,
    "final_logit_softcapping": _CAPPED,
    "first_k_dense_replace": _ROUTED,
    "moe_layer_freq": _ROUTED,
    "n_group": _ROUTED,
    "n_shared_experts": _ROUTED,
    "scoring_func": _ROUTED,
    "topk_group": _ROUTED,
    "use_expert_bias": _ROUTED,
    "attention_chunk_size": _WINDOW,
    "dual_chunk_attention_config": _WINDOW,
    "use_sliding_window": _WINDOW,
    "allow_neg_eigval": "the delta nets of Qwen3.5 have gates from 0 to 1",
    "layer_replication": "layers are not repeated",
    "per_layer_config": "every layer has the same sizes",
    "pruned_heads": "every layer has all heads",
    "hc_count": _QWEN4,
    "indexer_n_heads": _QWEN4,
    "ple_layer_ids": _QWEN4,
}
"""Keys that change the computation if they are set, and what is computed instead."""

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

YARN_FIXED: dict[str, tuple[Any, ...]] = {
    "beta_fast": (32,),
    "beta_slow": (1,),
    "extrapolation_factor": (1,),
    "truncate": (True,),
}
"""llama.cpp has keys for the first three, but does not read them for this architecture."""


def check_config(config: Mapping[str, Any]) -> list[str]:
    """Checks a parsed `config.json` and its `text_config`; returns remarks about unknown keys.

    Raises: CheckpointError: a key that changes the model in a way that llama.cpp, or this converter, does not
    support.
    """
    unknown: list[str] = []
    for values in (config, config.get("text_config") or {}):
        for key, value in values.items():
            if key in FIXED:
                _check_fixed(key, value, FIXED[key])
            elif key in CHANGES and value not in (None, False, 0, [], {}):
                raise CheckpointError(f"config.json: {key} is {value!r:.80}; {CHANGES[key]}")
            elif key not in READ | HARMLESS | CHANGES.keys() and not key.endswith(
                ("_token_id", "_token_index")
            ):
                unknown += _unknown(key, value)
    return _remarks("", unknown)


def check_rope(rope: Mapping[str, Any]) -> list[str]:
    """Checks `rope_parameters`; returns remarks about unknown keys.

    Raises: CheckpointError, as `check_config`.
    """
    fixed = YARN_FIXED if rope["rope_type"] == "yarn" else {}
    unknown: list[str] = []
    for key, value in rope.items():
        name = f"rope_parameters.{key}"
        if key in fixed:
            _check_fixed(name, value, fixed[key])
        elif isinstance(value, dict):
            raise CheckpointError(
                f"config.json: {name} is an object; the layers of Qwen3.5 share one rotary embedding"
            )
        elif key not in ROPE_READ | ROPE_HARMLESS:
            unknown += _unknown(key, value)
    return _remarks("rope_parameters: ", unknown)


def _check_fixed(name: str, value: Any, computed: tuple[Any, ...]) -> None:
    if value is not None and value not in computed:
        raise CheckpointError(
            f"config.json: {name} is {value!r}; llama.cpp computes Qwen3.5 with {computed[0]!r} whatever is "
            "said"
        )


def _unknown(name: str, value: Any) -> list[str]:
    """The key, unless it is off, empty, or a tool's note by its prefix."""
    return [name] if value and not name.startswith(("_", "unsloth")) else []


def _remarks(where: str, unknown: list[str]) -> list[str]:
    if not unknown:
        return []
    names = ", ".join(dict.fromkeys(unknown))
    return [f"config.json: {where}unknown to Qwen3.5, and ignored: {names}"]
