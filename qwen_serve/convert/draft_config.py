"""Reads and checks the parts of a block drafter's `config.json` that the conversion needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwen_serve.convert.config import MAX_LAYERS, check_heads, checked_integer, is_positive, rope_parameters
from qwen_serve.convert.errors import CheckpointError

DEFAULT_BLOCK = 16


@dataclass(frozen=True)
class DraftConfig:
    """A drafter's shapes. Counts are in heads, layers, tokens or elements, as the names say."""

    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    """Tokens that it can draft: the rows of its head. They are fewer than `vocab_size` if it has a `d2t`."""
    max_positions: int
    rms_norm_eps: float
    rope: Mapping[str, Any]
    block_size: int
    mask_token: int
    target_layers: tuple[int, ...]
    """Layers of the target whose outputs it reads, counted from 0."""
    sliding_window: int | None
    windowed_layers: tuple[bool, ...]
    """Which of its layers attend only to the sliding window; none without a window."""
    causal: bool | None

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> DraftConfig:
        """Reads a parsed `config.json`.

        Raises: CheckpointError: a field is missing or wrong, or has a value that llama.cpp would ignore.
        """

        whole = checked_integer
        config = _unwrapped(config)
        own = config.get("dflash_config") or {}
        if not isinstance(own, Mapping):
            raise CheckpointError(f"config.json: dflash_config must be an object, got {own!r}")
        n_layers = whole("num_hidden_layers", config.get("num_hidden_layers"))
        if n_layers > MAX_LAYERS:
            raise CheckpointError(f"config.json: num_hidden_layers is {n_layers}; llama.cpp has {MAX_LAYERS}")
        heads = whole("num_attention_heads", config.get("num_attention_heads"))
        kv_heads = whole("num_key_value_heads", config.get("num_key_value_heads"))
        check_heads(heads, kv_heads)
        hidden = whole("hidden_size", config.get("hidden_size"))
        layers = own.get("target_layer_ids") or config.get("target_layer_ids")
        if (
            not isinstance(layers, list)
            or not layers
            or not all(isinstance(i, int) and i >= 0 for i in layers)
        ):
            raise CheckpointError(
                f"config.json: dflash_config.target_layer_ids must be a list of layers, got {layers!r}"
            )
        mask = own.get("mask_token_id")
        if not isinstance(mask, int) or mask < 0:
            raise CheckpointError(f"config.json: dflash_config.mask_token_id must be a token, got {mask!r}")
        if (act := config.get("hidden_act", "silu")) != "silu":
            raise CheckpointError(f"config.json: hidden_act is {act!r}; this converter knows silu")
        if config.get("rope_is_neox_style", True) is not True:
            raise CheckpointError("config.json: rope_is_neox_style is false; this converter knows true")
        window = own.get("swa_window_size") or config.get("sliding_window")
        types = config.get("layer_types") or ["full_attention"] * n_layers
        if not isinstance(types, list):
            raise CheckpointError(f"config.json: layer_types must be a list, got {types!r}")
        windowed = tuple(own.get("use_swa", False) or kind == "sliding_attention" for kind in types)
        if len(windowed) != n_layers:
            raise CheckpointError(f"config.json: layer_types must name num_hidden_layers ({n_layers}) layers")
        has_window = bool((config.get("use_sliding_window") or own.get("use_swa")) and window)
        vocab = whole("vocab_size", config.get("vocab_size"))
        drafted = whole("draft_vocab_size", config.get("draft_vocab_size") or vocab)
        if drafted > vocab:
            raise CheckpointError(f"config.json: draft_vocab_size ({drafted}) is above vocab_size ({vocab})")
        eps = config.get("rms_norm_eps")
        if not is_positive(eps):
            raise CheckpointError(f"config.json: rms_norm_eps must be a positive number, got {eps!r}")
        causal = config.get("is_causal", own.get("causal"))
        return cls(
            hidden_size=hidden,
            intermediate_size=whole("intermediate_size", config.get("intermediate_size")),
            n_layers=n_layers,
            n_heads=heads,
            n_kv_heads=kv_heads,
            head_dim=whole("head_dim", config.get("head_dim") or hidden // heads),
            vocab_size=vocab,
            draft_vocab_size=drafted,
            max_positions=whole("max_position_embeddings", config.get("max_position_embeddings")),
            rms_norm_eps=eps,
            rope=rope_parameters(config)[0],
            block_size=whole("block_size", own.get("block_size", config.get("block_size", DEFAULT_BLOCK))),
            mask_token=mask,
            target_layers=tuple(layers),
            sliding_window=whole("sliding_window", window) if has_window else None,
            windowed_layers=windowed if has_window else (),
            causal=None if causal is None else bool(causal),
        )


def _unwrapped(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Converts a configuration of the speculators library to the authors' form.

    There the shapes of layers are in `transformer_layer_config`. `aux_hidden_state_layer_ids` counts the
    target's hidden states, the first of which is the embedding, so an id is the layer's number plus one.
    Sliding layers are causal unless `sliding_window_non_causal` is set (speculators/models/dflash).

    Raises: CheckpointError: an unsupported kind of drafter, or layers of which only some are causal.
    """
    if (inner := config.get("transformer_layer_config")) is None:
        return config
    for key, only in (("speculators_model_type", "dflash"), ("projector_type", "dflash")):
        if (value := config.get(key, only)) != only:
            raise CheckpointError(f"config.json: {key} is {value!r}; this converter knows {only!r}")
    if config.get("sample_from_anchor"):
        raise CheckpointError("config.json: sample_from_anchor is true; this converter knows false")
    states = config.get("aux_hidden_state_layer_ids")
    if not isinstance(states, list) or not all(isinstance(i, int) and i >= 1 for i in states):
        raise CheckpointError(
            "config.json: aux_hidden_state_layer_ids must be a list of hidden states, from 1 on; "
            f"got {states!r}"
        )
    own: dict[str, Any] = {
        "mask_token_id": config.get("mask_token_id"),
        "target_layer_ids": [state - 1 for state in states],
    }
    sliding = {kind == "sliding_attention" for kind in inner.get("layer_types") or ()}
    if True in sliding and not config.get("sliding_window_non_causal", False):
        if False in sliding:
            raise CheckpointError(
                "config.json: layer_types has sliding and full attention, and sliding_window_non_causal is "
                "false: llama.cpp computes all layers causally, or none"
            )
        own["causal"] = True
    return {**config, **inner, "dflash_config": own}
