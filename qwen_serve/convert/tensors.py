"""Maps checkpoint tensors to GGUF tensors: the tables, and the plan for one model.

Names on the GGUF side are those of llama.cpp's `qwen35` and `qwen35moe` (src/llama-arch.cpp,
src/models/qwen35.cpp, qwen35moe.cpp). The MTP block follows the trunk as block `n_layers`, with its own four
tensors under `nextn.`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

import gguf
import numpy as np
from numpy.typing import NDArray

from qwen_serve.convert.checkpoint import Checkpoint
from qwen_serve.convert.config import FULL, Experts, ModelConfig
from qwen_serve.convert.errors import CheckpointError
from qwen_serve.convert.experts import find_experts
from qwen_serve.convert.prune_vocab import kept_rows
from qwen_serve.convert.safetensors import WEIGHT_TYPES, StoredTensor, TensorSource
from qwen_serve.convert.transforms import (
    Transform,
    add_one,
    decay,
    squeeze_conv,
    tile_columns,
    tile_gate,
    tile_heads,
    tile_qkv,
)

FloatType = Literal["F32", "F16", "BF16"]
FLOAT_TYPES: tuple[FloatType, ...] = ("F16", "BF16", "F32")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rule:
    """One row of a table. Both names are relative to the layer or the model; shapes are torch's."""

    source: str
    target: str
    shape: Callable[[ModelConfig], Shape]
    reorder: Transform | None = None  # moves elements, in the checkpoint's dtype
    compute: Transform | None = None  # arithmetic, in float32; the result stays F32
    keep_f32: bool = False  # a matrix that llama.cpp still requires in F32
    per_token: bool = False  # a row for every token of the vocabulary
    per_expert: bool = False  # the matrices of all routed experts, in one of the layouts of convert.experts
    optional: bool = False

    def target_shape(self, config: ModelConfig) -> Shape:
        """The shape in the GGUF, in torch's order."""
        shape = self.shape(config)
        # the convolution's middle axis is 1
        return (shape[0], shape[2]) if len(shape) == 3 and not self.per_expert else shape


def _value_dim(c: ModelConfig) -> int:
    return c.linear_value_heads * c.linear_value_dim


def _conv_channels(c: ModelConfig) -> int:
    return 2 * c.linear_key_heads * c.linear_key_dim + _value_dim(c)


def _hidden(c: ModelConfig) -> Shape:
    return (c.hidden_size,)


def _embedding(c: ModelConfig) -> Shape:
    return (c.vocab_size, c.hidden_size)


EMBEDDING = Rule("embed_tokens.weight", "token_embd.weight", _embedding, per_token=True)
OUTPUT_NORM = Rule("norm.weight", "output_norm.weight", _hidden, compute=add_one)
OUTPUT = Rule("lm_head.weight", "output.weight", _embedding, per_token=True)


def _ffn(c: ModelConfig) -> int:
    assert c.intermediate_size is not None, "a dense model has a width"
    return c.intermediate_size


def _experts(c: ModelConfig) -> Experts:
    assert c.experts is not None, "these rules are for models of experts"
    return c.experts


EVERY_LAYER = (
    Rule("input_layernorm.weight", "attn_norm.weight", _hidden, compute=add_one),
    Rule("post_attention_layernorm.weight", "post_attention_norm.weight", _hidden, compute=add_one),
)

DENSE_FFN = (
    Rule("mlp.gate_proj.weight", "ffn_gate.weight", lambda c: (_ffn(c), c.hidden_size)),
    Rule("mlp.up_proj.weight", "ffn_up.weight", lambda c: (_ffn(c), c.hidden_size)),
    Rule("mlp.down_proj.weight", "ffn_down.weight", lambda c: (c.hidden_size, _ffn(c))),
)

MOE_FFN = (
    Rule(
        "mlp.gate.weight", "ffn_gate_inp.weight", lambda c: (_experts(c).count, c.hidden_size), keep_f32=True
    ),
    Rule(
        "mlp.experts.gate_proj",
        "ffn_gate_exps.weight",
        lambda c: (_experts(c).count, _experts(c).ffn, c.hidden_size),
        per_expert=True,
    ),
    Rule(
        "mlp.experts.up_proj",
        "ffn_up_exps.weight",
        lambda c: (_experts(c).count, _experts(c).ffn, c.hidden_size),
        per_expert=True,
    ),
    Rule(
        "mlp.experts.down_proj",
        "ffn_down_exps.weight",
        lambda c: (_experts(c).count, c.hidden_size, _experts(c).ffn),
        per_expert=True,
    ),
    Rule(
        "mlp.shared_expert.gate_proj.weight",
        "ffn_gate_shexp.weight",
        lambda c: (_experts(c).shared_ffn, c.hidden_size),
    ),
    Rule(
        "mlp.shared_expert.up_proj.weight",
        "ffn_up_shexp.weight",
        lambda c: (_experts(c).shared_ffn, c.hidden_size),
    ),
    Rule(
        "mlp.shared_expert.down_proj.weight",
        "ffn_down_shexp.weight",
        lambda c: (c.hidden_size, _experts(c).shared_ffn),
    ),
    Rule(
        "mlp.shared_expert_gate.weight",
        "ffn_gate_inp_shexp.weight",
        lambda c: (1, c.hidden_size),
        keep_f32=True,
    ),
)

FULL_ATTENTION = (
    # queries and their output gate, interleaved by head: twice the rows
    Rule("self_attn.q_proj.weight", "attn_q.weight", lambda c: (2 * c.n_heads * c.head_dim, c.hidden_size)),
    Rule("self_attn.k_proj.weight", "attn_k.weight", lambda c: (c.n_kv_heads * c.head_dim, c.hidden_size)),
    Rule("self_attn.v_proj.weight", "attn_v.weight", lambda c: (c.n_kv_heads * c.head_dim, c.hidden_size)),
    Rule("self_attn.o_proj.weight", "attn_output.weight", lambda c: (c.hidden_size, c.n_heads * c.head_dim)),
    Rule("self_attn.q_norm.weight", "attn_q_norm.weight", lambda c: (c.head_dim,), compute=add_one),
    Rule("self_attn.k_norm.weight", "attn_k_norm.weight", lambda c: (c.head_dim,), compute=add_one),
)

LINEAR_ATTENTION = (
    Rule(
        "linear_attn.in_proj_qkv.weight",
        "attn_qkv.weight",
        lambda c: (_conv_channels(c), c.hidden_size),
        reorder=tile_qkv,
    ),
    Rule(
        "linear_attn.in_proj_z.weight",
        "attn_gate.weight",
        lambda c: (_value_dim(c), c.hidden_size),
        reorder=tile_gate,
    ),
    Rule(
        "linear_attn.in_proj_b.weight",
        "ssm_beta.weight",
        lambda c: (c.linear_value_heads, c.hidden_size),
        reorder=tile_heads,
    ),
    Rule(
        "linear_attn.in_proj_a.weight",
        "ssm_alpha.weight",
        lambda c: (c.linear_value_heads, c.hidden_size),
        reorder=tile_heads,
    ),
    Rule(
        "linear_attn.conv1d.weight",
        "ssm_conv1d.weight",
        lambda c: (_conv_channels(c), 1, c.conv_kernel),
        reorder=squeeze_conv,
        keep_f32=True,
    ),
    Rule("linear_attn.dt_bias", "ssm_dt.bias", lambda c: (c.linear_value_heads,), reorder=tile_heads),
    Rule("linear_attn.A_log", "ssm_a", lambda c: (c.linear_value_heads,), compute=decay),
    # the gated norm is the one that is not zero-centred
    Rule("linear_attn.norm.weight", "ssm_norm.weight", lambda c: (c.linear_value_dim,)),
    Rule(
        "linear_attn.out_proj.weight",
        "ssm_out.weight",
        lambda c: (c.hidden_size, _value_dim(c)),
        reorder=tile_columns,
    ),
)

MTP = (
    Rule("fc.weight", "nextn.eh_proj.weight", lambda c: (c.hidden_size, 2 * c.hidden_size)),
    Rule("pre_fc_norm_embedding.weight", "nextn.enorm.weight", _hidden, compute=add_one),
    Rule("pre_fc_norm_hidden.weight", "nextn.hnorm.weight", _hidden, compute=add_one),
    Rule("norm.weight", "nextn.shared_head_norm.weight", _hidden, compute=add_one),
    # present if the configuration says mtp_use_dedicated_embeddings
    Rule(EMBEDDING.source, "nextn.embed_tokens.weight", _embedding, per_token=True, optional=True),
)

ALWAYS_F32 = {
    rule.target
    for rule in (*EVERY_LAYER, *DENSE_FFN, *MOE_FFN, *FULL_ATTENTION, *LINEAR_ATTENTION, *MTP)
    if rule.keep_f32
}
"""Matrices that stay F32 in every file, by their names inside a block."""

TEXT_PREFIXES = ("model.language_model.", "model.")  # inside Qwen3_5ForConditionalGeneration, and alone
VISION_PREFIX = "model.visual."
MTP_PREFIX = "mtp."


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the GGUF: its source, the changes to it, its `shape` (torch's order) and type."""

    name: str
    stored: TensorSource
    shape: Shape
    type: str
    """The type's name in gguf. I64 for a table with a source in I64. Quantized types need rows of whole
    blocks."""
    reorder: Transform | None
    compute: Transform | None

    @property
    def n_elements(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.n_bytes(self.n_elements)

    def n_bytes(self, count: int) -> int:
        """Bytes of `count` elements, in whole blocks."""
        elements, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.type]]
        return int(count // elements * n_bytes)


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of weights: in total, outside routed experts, and of one expert in all layers. And the number
    of experts."""

    total: int
    shared: int
    one_expert: int
    experts: int


@dataclass(frozen=True)
class TensorPlan:
    """Every tensor of the GGUF in the checkpoint's own order, so that reading is sequential."""

    tensors: tuple[PlannedTensor, ...]
    n_blocks: int
    n_mtp_layers: int
    kept_tokens: NDArray[np.int64] | None = field(default=None, compare=False)
    """Ids of the tokens whose rows stay, ascending; None for all."""

    @property
    def n_elements(self) -> int:
        return sum(t.n_elements for t in self.tensors)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    @property
    def parameter_counts(self) -> ParameterCounts:
        """Counts as gguf-py does for a model's size label (gguf_writer.py, get_total_parameter_count)."""
        routed = [t for t in self.tensors if "_exps." in t.name]
        in_routed = sum(t.n_elements for t in routed)
        return ParameterCounts(
            total=self.n_elements,
            shared=self.n_elements - in_routed,
            one_expert=sum(t.n_elements // t.shape[0] for t in routed),
            experts=routed[0].shape[0] if routed else 0,
        )


def plan_tensors(
    checkpoint: Checkpoint,
    outtype: FloatType,
    kept_layers: Sequence[int],
    kept_tokens: NDArray[np.int64] | None = None,
) -> TensorPlan:
    """Matches every tensor of the checkpoint with its rule. Trunk layers and tokens get their place in
    `kept_layers` and `kept_tokens` as number.

    Raises: CheckpointError: a tensor is missing, has another shape or dtype than the configuration implies,
        or is unknown.
    """
    config = checkpoint.config
    prefix = _text_prefix(checkpoint.tensors)
    has_mtp = any(name.startswith(MTP_PREFIX) for name in checkpoint.tensors)
    planned: dict[str, list[PlannedTensor]] = {}  # by the name of the first tensor that they are read from
    known: set[str] = set()
    for source, target, rule in expected_tensors(config, prefix, kept_layers, has_mtp):
        stored: TensorSource | None
        if rule.per_expert:
            stored, names = find_experts(checkpoint, source)
        else:
            stored, names = checkpoint.tensors.get(source), (source,)
        if stored is None and rule.optional:
            continue
        if stored is None:
            raise CheckpointError(f"{checkpoint.folder}: tensor {source} is missing")
        known.update(names)
        tensor = _plan_one(stored, target, rule, config, outtype)
        if rule.per_token and kept_tokens is not None:
            rows = kept_rows(stored, kept_tokens)
            tensor = replace(tensor, stored=rows, shape=rows.shape)
        planned.setdefault(names[0], []).append(tensor)
    vision = {name for name in checkpoint.tensors if name.startswith(VISION_PREFIX)}
    dropped = {f"{prefix}layers.{i}." for i in range(config.n_layers)} - {
        f"{prefix}layers.{i}." for i in kept_layers
    }
    for name in checkpoint.tensors.keys() - known - vision:
        if name == OUTPUT.source and config.tied_embeddings:
            continue  # a copy of the embedding, which transformers also ignores
        if not name.startswith(tuple(dropped)):
            raise CheckpointError(
                f"{checkpoint.folder}: no rule for tensor {name}; not a Qwen3.5 checkpoint, or its "
                "config.json belongs to another one?"
            )
    return TensorPlan(
        tensors=tuple(tensor for name in checkpoint.tensors for tensor in planned.get(name, ())),
        n_blocks=len(kept_layers) + int(has_mtp),
        n_mtp_layers=int(has_mtp),
        kept_tokens=kept_tokens,
    )


def _text_prefix(names: Mapping[str, StoredTensor]) -> str:
    for prefix in TEXT_PREFIXES:
        if f"{prefix}{EMBEDDING.source}" in names:
            return prefix
    expected = " or ".join(f"{prefix}{EMBEDDING.source}" for prefix in TEXT_PREFIXES)
    raise CheckpointError(f"the checkpoint has no tensor {expected}")


def expected_tensors(
    config: ModelConfig, prefix: str, kept_layers: Sequence[int], has_mtp: bool
) -> Iterator[tuple[str, str, Rule]]:
    """Yields (checkpoint name, GGUF name, rule) for every tensor that the configuration requires."""
    for rule in (EMBEDDING, OUTPUT_NORM):
        yield prefix + rule.source, rule.target, rule
    if not config.tied_embeddings:
        yield OUTPUT.source, OUTPUT.target, OUTPUT
    every_layer = (*EVERY_LAYER, *(DENSE_FFN if config.experts is None else MOE_FFN))
    for block, layer in enumerate(kept_layers):
        attention = FULL_ATTENTION if config.layer_types[layer] == FULL else LINEAR_ATTENTION
        for rule in (*every_layer, *attention):
            yield f"{prefix}layers.{layer}.{rule.source}", f"blk.{block}.{rule.target}", rule
    if has_mtp:
        block = len(kept_layers)
        for rule in MTP:
            yield f"{MTP_PREFIX}{rule.source}", f"blk.{block}.{rule.target}", rule
        for rule in (*every_layer, *FULL_ATTENTION):
            yield f"{MTP_PREFIX}layers.0.{rule.source}", f"blk.{block}.{rule.target}", rule


def check_weight_type(stored: TensorSource) -> None:
    """Raises: CheckpointError: the type is not one that weights are converted from."""
    if stored.dtype not in WEIGHT_TYPES:
        raise CheckpointError(
            f"{stored.path}: tensor {stored.name} is {stored.dtype}; known are {', '.join(WEIGHT_TYPES)}"
        )


def _plan_one(
    stored: TensorSource, target: str, rule: Rule, config: ModelConfig, outtype: FloatType
) -> PlannedTensor:
    shape = rule.shape(config)
    if stored.shape != shape:
        raise CheckpointError(
            f"{stored.path}: tensor {stored.name} has shape {list(stored.shape)}, "
            f"config.json implies {list(shape)}"
        )
    check_weight_type(stored)
    # llama.cpp's kernels take vectors and the convolution only in F32
    in_f32 = len(shape) == 1 or rule.keep_f32
    return PlannedTensor(
        name=target,
        stored=stored,
        shape=rule.target_shape(config),
        type="F32" if in_f32 else outtype,
        reorder=rule.reorder,
        compute=rule.compute,
    )
