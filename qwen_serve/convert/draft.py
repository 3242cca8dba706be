"""Block drafters (DFlash): converts their checkpoint to a GGUF of llama.cpp's architecture `dflash`.

A drafter has a few Qwen3-style layers. They read the outputs of some of the target's layers, which `fc` fuses
into one row a token. The vocabulary is the target's. Embedding and head are the target's, too, unless the
drafter has its own. A drafter's head may have rows for only some of the tokens, which `d2t` lists. Names and
keys are llama.cpp's (src/models/dflash.cpp; conversion/qwen.py, DFlashModel, and DSparkModel for `d2t`). Two
layouts are supported: the authors' (z-lab) and that of vLLM's speculators library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from qwen_serve.convert.checkpoint import Checkpoint, read_json, read_tensors, shard_stamps
from qwen_serve.convert.draft_config import DraftConfig
from qwen_serve.convert.errors import CheckpointError, ConvertError
from qwen_serve.convert.gguf_file import write_file
from qwen_serve.convert.metadata import FILE_TYPES, add_attention, add_general, add_rope, add_tokenizer
from qwen_serve.convert.safetensors import TABLE_TYPES, StoredTensor
from qwen_serve.convert.source import Source
from qwen_serve.convert.stages import file_digest, fingerprint
from qwen_serve.convert.tensors import FloatType, PlannedTensor, Shape, TensorPlan, check_weight_type
from qwen_serve.convert.vocab import Vocab

ARCH = "dflash"
ARCHITECTURES = ("DFlashDraftModel", "DFlashSpeculator")
_SELECTOR = "its candidate selector and convolutions are not computed when this server drafts"
_MARKOV = "its Markov head, which looks at the token before, is not computed when this server drafts"
LACKS = {
    "DFlash2DraftModel": _SELECTOR,
    "DFlash2Speculator": _SELECTOR,
    "Qwen3DSparkModel": _MARKOV,
    "DSparkDraftModel": _MARKOV,
    "DSparkSpeculator": _MARKOV,
}
"""Architectures of drafters that llama.cpp has and this server lacks a part of."""
OTHER_KINDS = ("candidate_selector", "conv", "markov", "confidence")
"""Parts of tensor names that only DFlash2 and DSpark have."""


@dataclass(frozen=True)
class Table:
    """A tensor of integers (`convert.safetensors.TensorSource`)."""

    name: str
    path: Path
    values: npt.NDArray[np.int64]
    dtype = "I64"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def read(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Elements `start` to `start + count`."""
        return self.values[start : start + count]


@dataclass(frozen=True)
class DraftCheckpoint:
    """An opened drafter and its target's checkpoint; no weight is read."""

    folder: Path
    config: DraftConfig
    tensors: Mapping[str, StoredTensor]
    target: Checkpoint

    @classmethod
    def open(cls, folder: Path, target: Checkpoint) -> DraftCheckpoint:
        """Opens `folder` and checks that it fits `target`.

        Raises:
            CheckpointError: a file is missing or damaged, or the two do not belong together.
        """
        config = DraftConfig.from_json(read_json(folder / "config.json"))
        other = target.config
        for name, own, its in (
            ("hidden_size", config.hidden_size, other.hidden_size),
            ("vocab_size", config.vocab_size, other.vocab_size),
        ):
            if own != its:
                raise CheckpointError(
                    f"{folder}: {name} is {own}, that of {target.folder} is {its}: another model's drafter"
                )
        # llama.cpp reads the next layer's input, so the last layer's output is unavailable
        if max(config.target_layers) >= other.n_layers - 1:
            raise CheckpointError(
                f"{folder}: target_layer_ids {list(config.target_layers)}: {target.folder} has "
                f"{other.n_layers} layers, of which the last one's output cannot be read"
            )
        if config.mask_token >= other.vocab_size:
            raise CheckpointError(f"{folder}: mask_token_id {config.mask_token} has no row in the embedding")
        return cls(folder, config, read_tensors(folder), target)

    def fingerprint(self) -> str:
        """A digest that changes with every file that the GGUF is made from."""
        text = file_digest(self.folder / "config.json")
        shards = shard_stamps(self.tensors)
        return fingerprint({"shards": shards, "config": text, "target": self.target.fingerprint()})

    def plan(self, outtype: FloatType) -> TensorPlan:
        """Every tensor of the GGUF, in the order of the checkpoint.

        Raises: CheckpointError: a tensor is missing, unknown, or not of the shape that config.json implies.
        """
        expected = dict(expected_tensors(self.config))
        given = {name.removeprefix("model."): tensor for name, tensor in self.tensors.items()}
        offsets = given.pop("d2t", None)
        given.pop("t2d", None)  # the mask of the target's tokens, which follows from d2t
        if other := sorted(name for name in given if any(part in name for part in OTHER_KINDS)):
            raise CheckpointError(
                f"{self.folder}: tensor {other[0]}: a DFlash2 or DSpark drafter; this converter knows DFlash"
            )
        planned = []
        for name, tensor in given.items():
            if name not in expected:
                raise CheckpointError(f"{self.folder}: no rule for tensor {tensor.name}")
            target, shape = expected[name]
            if tensor.shape != shape:
                raise CheckpointError(
                    f"{tensor.path}: tensor {tensor.name} has shape {list(tensor.shape)}, "
                    f"config.json implies {list(shape)}"
                )
            check_weight_type(tensor)
            kind: FloatType = "F32" if len(shape) == 1 else outtype
            planned.append(PlannedTensor(target, tensor, shape, kind, None, None))
        lent = set(LENT)
        if offsets is not None or self.config.draft_vocab_size < self.config.vocab_size:
            lent.remove("lm_head.weight")
            if offsets is None:
                raise CheckpointError(
                    f"{self.folder}: draft_vocab_size is {self.config.draft_vocab_size}, vocab_size "
                    f"{self.config.vocab_size}, and there is no tensor d2t from one to the other"
                )
            ids = self._target_ids(offsets)
            planned.append(PlannedTensor("d2t", ids, ids.shape, "I64", None, None))
        if missing := sorted(set(expected) - set(given) - lent):
            raise CheckpointError(f"{self.folder}: tensor {missing[0]} is missing")
        return TensorPlan(tuple(planned), n_blocks=self.config.n_layers, n_mtp_layers=0)

    def _target_ids(self, offsets: StoredTensor) -> Table:
        """The target's token of each row of the head. The file stores each id's offset from its row.

        Raises: CheckpointError: not one for each row, unknown tokens, or duplicates.
        """
        where, size = f"{offsets.path}: tensor {offsets.name}", self.config.draft_vocab_size
        if offsets.dtype not in TABLE_TYPES or offsets.shape != (size,):
            raise CheckpointError(
                f"{where} is {offsets.dtype} of shape {list(offsets.shape)}; want {' or '.join(TABLE_TYPES)} "
                f"of shape {[size]}, by draft_vocab_size"
            )
        ids = offsets.read().astype(np.int64) + np.arange(size)
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            raise CheckpointError(
                f"{where} leads to tokens {ids.min()} to {ids.max()}, of {self.config.vocab_size}"
            )
        if len(np.unique(ids)) != size:
            raise CheckpointError(f"{where} leads to the same token twice")
        return Table("d2t", offsets.path, ids)


LENT = {"embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight"}
"""Tensors that a drafter need not have; it then uses the target's."""


def expected_tensors(c: DraftConfig) -> Iterator[tuple[str, tuple[str, Shape]]]:
    """Checkpoint name, then GGUF name and shape."""
    wide, query, key = c.hidden_size, c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    for (source, target), rows in zip(LENT.items(), (c.vocab_size, c.draft_vocab_size), strict=True):
        yield source, (target, (rows, wide))
    yield "fc.weight", ("fc.weight", (wide, len(c.target_layers) * wide))
    yield "hidden_norm.weight", ("enc.output_norm.weight", (wide,))
    yield "norm.weight", ("output_norm.weight", (wide,))
    for layer in range(c.n_layers):
        for source, target, shape in (
            ("self_attn.q_proj", "attn_q", (query, wide)),
            ("self_attn.k_proj", "attn_k", (key, wide)),
            ("self_attn.v_proj", "attn_v", (key, wide)),
            ("self_attn.o_proj", "attn_output", (wide, query)),
            ("self_attn.q_norm", "attn_q_norm", (c.head_dim,)),
            ("self_attn.k_norm", "attn_k_norm", (c.head_dim,)),
            ("input_layernorm", "attn_norm", (wide,)),
            ("post_attention_layernorm", "ffn_norm", (wide,)),
            ("mlp.gate_proj", "ffn_gate", (c.intermediate_size, wide)),
            ("mlp.up_proj", "ffn_up", (c.intermediate_size, wide)),
            ("mlp.down_proj", "ffn_down", (wide, c.intermediate_size)),
        ):
            yield f"layers.{layer}.{source}.weight", (f"blk.{layer}.{target}.weight", shape)


def is_draft(folder: Path) -> bool:
    """Whether a checkpoint folder holds a drafter of this kind.

    Raises:
        ConvertError: a drafter of another kind.
    """
    named = read_json(folder / "config.json").get("architectures") or []
    for other, lacks in LACKS.items():
        if other in named:
            raise ConvertError(
                f"{folder}: architectures is {other}: {lacks}; of the drafters this is for {ARCHITECTURES[0]}"
            )
    return any(name in named for name in ARCHITECTURES)


def write_draft(path: Path, draft: DraftCheckpoint, source: Source, outtype: FloatType) -> None:
    """Writes the drafter's GGUF, with the target's tokenizer.

    Raises: CheckpointError: as `write_gguf` does.
    """
    plan = draft.plan(outtype)
    writer = gguf.GGUFWriter(path=None, arch=ARCH)
    add_general(writer, draft.folder, source, plan)
    add_draft_hyperparameters(
        writer, draft.config, outtype, mrope="mrope_section" in draft.target.config.rope
    )
    add_tokenizer(writer, Vocab.load(draft.target.folder, draft.target.config))
    writer.add_uint32(gguf.Keys.Tokenizer.MASK_ID, draft.config.mask_token)
    write_file(path, writer, plan, draft.target.config)


def add_draft_hyperparameters(
    writer: gguf.GGUFWriter, config: DraftConfig, outtype: FloatType, *, mrope: bool
) -> None:
    """Adds `dflash.*`. With `mrope` the target's positions have several axes; the drafter uses the first."""
    writer.add_block_count(config.n_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    add_attention(writer, config)
    writer.add_file_type(FILE_TYPES[outtype])
    add_rope(writer, config.rope)
    if "partial_rotary_factor" in config.rope:
        writer.add_rope_dimension_count(int(config.head_dim * float(config.rope["partial_rotary_factor"])))
    if mrope:
        writer.add_rope_dimension_sections([config.head_dim // 2, 0, 0, 0])
    # gguf 0.19.0 has no methods for these
    writer.add_uint32(f"{ARCH}.block_size", config.block_size)
    # llama.cpp stores the layer that reads it, the next one
    writer.add_array(f"{ARCH}.target_layers", [layer + 1 for layer in config.target_layers])
    if config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
        writer.add_array(f"{ARCH}.attention.sliding_window_pattern", list(config.windowed_layers))
    if config.causal is not None:
        writer.add_causal_attention(config.causal)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
