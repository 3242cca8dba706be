"""Which level of a `config.json` decides: the outer one, or `text_config`.

transformers builds the text model from `text_config` alone (`Qwen3_5Config`), with its classes' defaults for
missing keys. Of the outer level it reads whether embedding and head are tied, if the whole model is loaded
(`Qwen3_5ForConditionalGeneration`). Where the text model stands alone (`Qwen3_5ForCausalLM`), the same
`text_config` decides that, too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from qwen_serve.convert.config_keys import READ

TIED, INNER = "tie_word_embeddings", "text_config"

DEFAULTS: dict[str, Any] = {
    "vocab_size": 248320,
    "num_attention_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
DENSE_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}
MOE_DEFAULTS: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}
"""Of `Qwen3_5TextConfig` and `Qwen3_5MoeTextConfig`; saved configurations rarely leave them out."""

OUTER = {"architectures", "compression_config", "quantization_config", TIED, INNER}
"""Keys that are read on the outer level, too."""

OFTEN_ASKED = {
    "Qwen3NextForCausalLM": "Qwen3-Next: another arrangement of the delta nets' projections and other MTP "
    "tensors, which this server's kernels and planning do not know; llama.cpp runs it as qwen3next",
    "Qwen4ExpForConditionalGeneration": "Qwen4-Exp: hyper-connections, per-layer n-gram embeddings and "
    "sparse attention with an indexer, which llama.cpp does not compute",
    "Qwen4ExpForCausalLM": "Qwen4-Exp: hyper-connections, per-layer n-gram embeddings and sparse attention "
    "with an indexer, which llama.cpp does not compute",
}
"""Architectures that are near, and why they are not converted."""


def text_values(
    config: Mapping[str, Any], named: Sequence[str], has_experts: bool
) -> tuple[dict[str, Any], list[str]]:
    """The text model's values as transformers reads them, and remarks about those that it does not read.

    `named` is `architectures`.
    """
    defaults = DEFAULTS | (MOE_DEFAULTS if has_experts else DENSE_DEFAULTS)
    if (inner := config.get(INNER)) is None:
        return {**defaults, **config}, []
    text = {**defaults, **inner}
    if any(name.endswith("ForConditionalGeneration") for name in named):
        text[TIED] = config.get(TIED)
    if "mtp_num_hidden_layers" not in inner:  # transformers has no MTP; llama.cpp reads both levels
        text["mtp_num_hidden_layers"] = config.get("mtp_num_hidden_layers")
    unread = [
        f"{key} ({value!r:.60})"
        for key, value in config.items()
        if key in READ - OUTER and value not in (None, text.get(key))
    ]
    if unread:
        names = ", ".join(unread)
        return text, [f"config.json: beside {INNER}, which decides, these are without effect: {names}"]
    return text, []
