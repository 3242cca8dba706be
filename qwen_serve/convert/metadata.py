"""The GGUF's key-value pairs: the model's name and origin, its hyperparameters, its tokenizer.

Key names and value types are those that llama.cpp reads (src/llama-arch.cpp, src/models/qwen35.cpp,
qwen35moe.cpp); names, licence and model-card fields follow gguf's own heuristics.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import gguf
from gguf.utility import size_label

from qwen_serve.convert.checkpoint import read_json
from qwen_serve.convert.config import LINEAR, ModelConfig, attention_factor_ratio
from qwen_serve.convert.draft_config import DraftConfig
from qwen_serve.convert.errors import CheckpointError
from qwen_serve.convert.source import Source
from qwen_serve.convert.tensors import FloatType, TensorPlan
from qwen_serve.convert.vocab import Vocab

FILE_TYPES: dict[str, gguf.LlamaFileType] = {
    "F32": gguf.LlamaFileType.ALL_F32,
    "F16": gguf.LlamaFileType.MOSTLY_F16,
    "BF16": gguf.LlamaFileType.MOSTLY_BF16,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}

RATIO_OF_ONE = 1e-6

WHOLE_NUMBERS = ("top_k", "penalty_last_n", "mirostat")
SAMPLING = {
    **{name: name for name in ("top_k", "top_p", "min_p", "xtc_probability", "xtc_threshold")},
    **{name: name for name in ("penalty_last_n", "mirostat", "mirostat_tau", "mirostat_eta")},
    "temperature": "temp",
    "repetition_penalty": "penalty_repeat",
}
"""Keys of generation_config.json, and gguf's names for them."""


def add_general(
    writer: gguf.GGUFWriter,
    folder: Path,
    source: Source,
    plan: TensorPlan,
    kind: str = gguf.GGUFType.MODEL,
) -> None:
    """`general.*`: name, size, source, sampling (generation_config.json) and licence (model card)."""
    counts = plan.parameter_counts
    metadata = _metadata(folder, counts.total)
    if source.repo_id is not None:
        # the hub's cache names folders after commits, which the heuristics would take for the model's name
        name, organization, basename, finetune, version, label = gguf.Metadata.get_model_id_components(
            source.repo_id, counts.total
        )
        card = gguf.Metadata.load_model_card(folder)
        metadata.name = card.get("name") or card.get("model_name") or gguf.Metadata.id_to_title(name)
        metadata.organization = metadata.organization or gguf.Metadata.id_to_title(organization)
        metadata.basename, metadata.finetune, metadata.version = basename, finetune, version
        metadata.size_label = label
        metadata.source_url = f"{source.url}/tree/{source.revision}" if source.revision else source.url
        metadata.source_repo_url = source.url
    if metadata.size_label is None:
        metadata.size_label = size_label(counts.total, counts.shared, counts.one_expert, counts.experts)
    writer.add_type(kind)
    metadata.set_gguf_meta_model(writer)


def _metadata(folder: Path, n_params: int) -> gguf.Metadata:
    """What gguf finds in the model card and the configuration, and how to sample. gguf's own `Metadata.load`
    stumbles over a BOM.

    Raises: CheckpointError: a file that cannot be read.
    """
    try:
        card = gguf.Metadata.load_model_card(folder)
    except Exception as error:  # of YAML, of its types, or of UTF-8
        said = " ".join(str(error).split())
        raise CheckpointError(
            f"{folder / 'README.md'}: its front matter is not a YAML mapping in UTF-8 ({said:.120}); mend or "
            "remove the file"
        ) from None
    config, generation = (
        read_json(path) if path.is_file() else {}
        for path in (folder / "config.json", folder / "generation_config.json")
    )
    metadata = gguf.Metadata.apply_metadata_heuristic(gguf.Metadata(), card, config, folder, n_params)
    for entry in fields(metadata):
        setattr(metadata, entry.name, _as_texts(getattr(metadata, entry.name)))
    for key, name in SAMPLING.items():
        setattr(metadata, f"sampling_{name}", _number(key, generation.get(key), name in WHOLE_NUMBERS))
    return metadata


def _as_texts(value: Any) -> Any:
    """A model card's value with texts in place of numbers and dates, which YAML reads where a text is
    meant."""
    if isinstance(value, dict):
        return {key: _as_texts(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_as_texts(each) for each in value]
    return value if value is None else str(value)


def _number(key: str, value: Any, whole: bool) -> float | int | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not abs(value) < 2**63 or (whole and value % 1):
        wanted = "a whole number" if whole else "a number"
        raise CheckpointError(f"generation_config.json: {key} is {value!r:.60}; want {wanted}")
    return int(value) if whole else float(value)


def add_attention(writer: gguf.GGUFWriter, config: ModelConfig | DraftConfig) -> None:
    """Adds heads and norms, which are the same for a model and its drafter."""
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def add_rope(writer: gguf.GGUFWriter, rope: Mapping[str, Any]) -> None:
    """Adds rotary frequencies and their scaling, for a model or its drafter. `rope` is from
    `rope_parameters`."""
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if (kind := rope["rope_type"]) != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        # as llama.cpp's converter writes them, though llama.cpp reads none of them for these architectures
        for key, add in (
            ("extrapolation_factor", writer.add_rope_scaling_yarn_ext_factor),
            ("attention_factor", writer.add_rope_scaling_yarn_attn_factor),
            ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
            ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
        ):
            if rope.get(key) is not None:
                add(rope[key])
        if abs((ratio := attention_factor_ratio(rope)) - 1) > RATIO_OF_ONE:
            # llama.cpp reads this one, and multiplies it by the factor that it infers (llama-context.cpp)
            writer.add_rope_scaling_attn_factors(ratio)


def add_hyperparameters(
    writer: gguf.GGUFWriter,
    config: ModelConfig,
    plan: TensorPlan,
    kept_layers: tuple[int, ...],
    outtype: FloatType,
) -> None:
    """`qwen35.*` or `qwen35moe.*`: shapes, experts, rope, the delta net's heads, which blocks are recurrent,
    the MTP block's count."""
    writer.add_block_count(plan.n_blocks)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    if config.intermediate_size is not None:
        writer.add_feed_forward_length(config.intermediate_size)
    if (experts := config.experts) is not None:
        writer.add_expert_count(experts.count)
        writer.add_expert_used_count(experts.used)
        writer.add_expert_feed_forward_length(experts.ffn)
        writer.add_expert_shared_feed_forward_length(experts.shared_ffn)
    add_attention(writer, config)
    writer.add_file_type(FILE_TYPES[outtype])

    add_rope(writer, config.rope)
    writer.add_rope_dimension_count(config.rotary_dim)
    writer.add_rope_dimension_sections(list(config.mrope_sections))

    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.linear_key_dim)
    writer.add_ssm_group_count(config.linear_key_heads)
    writer.add_ssm_time_step_rank(config.linear_value_heads)
    writer.add_ssm_inner_size(config.linear_value_heads * config.linear_value_dim)
    recurrent = [config.layer_types[layer] == LINEAR for layer in kept_layers] + [False] * plan.n_mtp_layers
    # gguf 0.19.0 has no method for this key
    writer.add_array(f"{config.arch}.attention.recurrent_layers", recurrent)
    writer.add_full_attention_interval(config.attention_interval)
    if plan.n_mtp_layers:
        writer.add_nextn_predict_layers(plan.n_mtp_layers)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def add_tokenizer(writer: gguf.GGUFWriter, vocab: Vocab) -> None:
    """`tokenizer.*`: byte-level BPE under llama.cpp's name for it, gpt2."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocab.pre_tokenizer)
    writer.add_token_list(vocab.tokens)
    writer.add_token_types(vocab.types)
    writer.add_token_merges(vocab.merges)
    for kind, id_ in vocab.special_ids.items():
        getattr(writer, f"add_{kind}_token_id")(id_)
    for kind, flag in vocab.add_special.items():
        if adder := getattr(writer, f"add_add_{kind}_token", None):  # no key for unk, pad, cls, mask
            adder(flag)
    if vocab.chat_template is not None:
        writer.add_chat_template(vocab.chat_template)
