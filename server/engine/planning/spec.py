"""The sizes of a model and of a draft model, from the metadata and the tensors of their files."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import numpy as np

from qwen_serve.llamacpp import CACHE_TYPES, is_quantized, row_bytes
from qwen_serve.llamacpp.errors import ModelLoadError
from qwen_serve.llamacpp.gguf import Metadata
from qwen_serve.server.engine.model_file import ModelFile

from .limits import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_MTP,
    MAX_WIDTH,
    check_attention,
    check_experts,
    check_recurrence,
)

if TYPE_CHECKING:
    from qwen_serve.llamacpp.gguf import Header, TensorInfo
    from qwen_serve.server.engine.settings import EngineSettings

ARCHITECTURES = ("qwen35", "qwen35moe")
"""llama.cpp's names for Qwen3.5 (`general.architecture`), dense and with experts."""

DRAFT_ARCHITECTURE = "dflash"
"""llama.cpp's name for block drafters (`general.architecture`)."""

MAX_BLOCK = 256
"""Tokens of a block: every one is a row of one pass."""

TOKENS, EMBEDDING = "tokenizer.ggml.tokens", "token_embd.weight"

_BLOCK = re.compile(r"blk\.(\d{1,6})\.")


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of a model, in bytes unless said otherwise; tuples are by layer of the trunk."""

    file: ModelFile = field(compare=False)
    n_blocks: int
    """Layers in the file, multi-token-prediction blocks included."""
    n_embd: int
    """Elements of a hidden state."""
    n_vocab: int
    """Tokens of the vocabulary; 0 where the file has none."""
    n_ctx_train: int
    """Tokens of the longest sequence that it was made for."""
    layer_weights: tuple[int, ...]
    input_weights: int
    output_weights: int
    """The final norm and the head, which is a second copy of the embedding when the two are tied."""
    output_is_tied: bool
    mtp_weights: int
    """The multi-token-prediction blocks; loaded only if they are to draft."""
    mtp_kv_elements: tuple[int, int]
    """Keys and values of one token in those blocks, in elements."""
    kv_elements: tuple[tuple[int, int], ...]
    """Keys and values of one token, in elements; zero in recurrent layers."""
    layer_state: tuple[int, ...]
    """One sequence's recurrent state, F32; zero in attention layers."""
    draft: DraftSpec | None = None
    """The draft model beside it, if there is one."""
    embedding_type: int = 0
    """ggml's number for the type of the token embedding (`enum ggml_type`)."""
    layer_copies: tuple[int, ...] = ()
    """Copies in FP16 of the quantized matrices; those of experts have none."""
    output_copies: int = 0
    mtp_copies: int = 0

    @property
    def state(self) -> int:
        """Bytes of one sequence's recurrent state in all layers."""
        return sum(self.layer_state)

    def kv_cell(self, layer: int, settings: EngineSettings) -> int:
        """Bytes that one token takes in one layer's cache."""
        return kv_bytes(self.kv_elements[layer], settings)

    def cell(self, settings: EngineSettings) -> int:
        """Bytes of one token in all layers."""
        return sum(self.kv_cell(layer, settings) for layer in range(len(self.kv_elements)))

    def mtp_cell(self, settings: EngineSettings) -> int:
        """Bytes of one token in the multi-token-prediction blocks."""
        return kv_bytes(self.mtp_kv_elements, settings)

    @classmethod
    def from_header(cls, header: Header) -> Self:
        """Raises ModelLoadError for another architecture, and where metadata are missing or make no sense.

        What the layers keep: llama.cpp's llama-hparams.cpp.
        """
        if (arch := header.metadata.get("general.architecture")) not in ARCHITECTURES:
            raise ModelLoadError(
                f"{header.name} is of architecture {arch!r}; this server runs Qwen3.5 "
                f"({' or '.join(ARCHITECTURES)})"
            )
        metadata = Metadata(header, str(arch))
        n_ctx_train = metadata.integer("context_length", least=1)
        n_blocks = metadata.integer("block_count", least=1)
        n_mtp = metadata.integer("nextn_predict_layers", 0)
        n_trunk = n_blocks - n_mtp
        blocks: Counter[int] = Counter()
        copies: Counter[int] = Counter()
        is_tied = "output.weight" not in header.tensors
        output_copies = 0
        input_weights = output_weights = 0
        for name, tensor in header.tensors.items():
            if match := _BLOCK.match(name):
                blocks[int(match[1])] += tensor.n_bytes
                copies[int(match[1])] += _copy(tensor)
            elif name.startswith("token_embd"):
                input_weights += tensor.n_bytes
                output_copies += _copy(tensor) if is_tied else 0
            else:
                output_weights += tensor.n_bytes
                output_copies += _copy(tensor)
        if n_blocks != len(blocks) or n_blocks != max(blocks) + 1 or n_trunk < 1:
            raise ModelLoadError(
                f"{header.name}: by its metadata it has {n_blocks:,} layers, {n_mtp:,} of them to "
                f"predict further tokens; there are tensors of {len(blocks):,}"
            )
        metadata.relate("block_count", n_blocks <= MAX_LAYERS, f"at most {MAX_LAYERS}")
        metadata.relate("nextn_predict_layers", n_mtp <= MAX_MTP, f"at most {MAX_MTP}")
        check_attention(metadata)
        check_recurrence(metadata)
        check_experts(metadata, header)
        n_embd = metadata.integer("embedding_length", least=1, most=MAX_WIDTH)
        heads = _by_layer(metadata, "attention.head_count", n_blocks, n_trunk)
        heads_kv = _by_layer(metadata, "attention.head_count_kv", n_blocks, n_trunk, default=heads[0])
        head_size = n_embd // max(heads[0], 1)
        key_length = metadata.integer("attention.key_length", head_size)
        value_length = metadata.integer("attention.value_length", head_size)
        kv_elements = [(n * key_length, n * value_length) for n in heads_kv]
        inner, state = metadata.integer("ssm.inner_size", 0), metadata.integer("ssm.state_size", 0)
        recurrent = [
            bool(layer) for layer in _by_layer(metadata, "attention.recurrent_layers", n_blocks, n_trunk)
        ]
        if state and metadata.get("attention.recurrent_layers") is None:
            interval = metadata.integer("full_attention_interval", 4, least=1)
            recurrent = [layer % interval != interval - 1 for layer in range(n_blocks)]
        channels = inner + 2 * metadata.integer("ssm.group_count", 0) * state
        layer_state = 4 * ((metadata.integer("ssm.conv_kernel", 1, least=1) - 1) * channels + inner * state)
        return cls(
            file=ModelFile.of(header.path, header.status),
            n_blocks=n_blocks,
            n_embd=n_embd,
            n_vocab=header.lengths.get(TOKENS, 0),
            n_ctx_train=n_ctx_train,
            layer_weights=tuple(blocks[layer] for layer in range(n_trunk)),
            input_weights=input_weights,
            embedding_type=embedding.type if (embedding := header.tensors.get(EMBEDDING)) else 0,
            output_weights=output_weights + (input_weights if is_tied else 0),
            output_is_tied=is_tied,
            mtp_weights=sum(blocks[layer] for layer in range(n_trunk, n_blocks)),
            mtp_kv_elements=(
                sum(k for k, _ in kv_elements[n_trunk:]),
                sum(v for _, v in kv_elements[n_trunk:]),
            ),
            kv_elements=tuple((0, 0) if recurrent[i] else kv_elements[i] for i in range(n_trunk)),
            layer_state=tuple(layer_state if recurrent[i] else 0 for i in range(n_trunk)),
            layer_copies=tuple(copies[layer] for layer in range(n_trunk)),
            output_copies=output_copies,
            mtp_copies=sum(copies[layer] for layer in range(n_trunk, n_blocks)),
        )


def _copy(tensor: TensorInfo) -> int:
    """Bytes of its copy in FP16, as `llama_model_keep_f16_copies` of llama-model.cpp chooses them."""
    return 2 * tensor.n_elements if len(tensor.shape) == 2 and is_quantized(tensor.type) else 0


def _by_layer(metadata: Metadata, key: str, n_blocks: int, n_trunk: int, *, default: int = 0) -> list[int]:
    """One value for each block; blocks beyond the trunk may be left out."""
    values = (default,) if metadata.get(key) is None else metadata.integers(key)
    if len(values) == 1:
        values *= n_blocks
    if len(values) not in (n_blocks, n_trunk):
        raise metadata.unusable(key, f"one number, or one for each of {n_blocks} layers")
    return [*values, *[0] * (n_blocks - len(values))]


def kv_bytes(elements: tuple[int, int], settings: EngineSettings) -> int:
    """Bytes of keys and values, given in elements, as the cache stores them."""
    keys, values = elements
    return row_bytes(CACHE_TYPES[settings.cache_type_k], keys) + row_bytes(
        CACHE_TYPES[settings.cache_type_v], values
    )


@dataclass(frozen=True)
class DraftSpec:
    """A block drafter."""

    file: ModelFile
    weights: int
    """Bytes."""
    block: int
    """Tokens of a block, the newest one included."""
    mask: int
    """Token that stands for one to be guessed."""
    layers: tuple[int, ...]
    """Of the trunk, whose inputs it reads."""
    n_embd: int
    """Elements of a hidden state, the trunk's too."""
    kv_elements: tuple[int, int]
    """Keys and values of one token in all layers, in elements."""
    causal: bool

    @property
    def n_features(self) -> int:
        """Elements that it reads of a token."""
        return len(self.layers) * self.n_embd

    def cell(self, settings: EngineSettings) -> int:
        """Bytes of one token in its cache."""
        return kv_bytes(self.kv_elements, settings)

    @classmethod
    def from_header(cls, header: Header, target: ModelSpec) -> Self:
        """Raises ModelLoadError for another kind of file, or where it is another model's drafter."""
        if (kind := header.metadata.get("general.architecture")) != DRAFT_ARCHITECTURE:
            raise ModelLoadError(
                f"{header.name} is of architecture {kind!r}; this server drafts with {DRAFT_ARCHITECTURE}"
            )
        if other := [name for name in header.tensors if name.startswith(("selector_", "markov_"))]:
            raise ModelLoadError(
                f"{header.name} has a tensor {other[0]}: a DFlash2 or DSpark drafter; "
                "this server drafts with DFlash"
            )
        metadata = Metadata(header, DRAFT_ARCHITECTURE)
        layers = metadata.integers("target_layers")
        n_embd, n_trunk = metadata.integer("embedding_length"), len(target.layer_weights)
        if n_embd != target.n_embd or max(layers) >= n_trunk:
            raise ModelLoadError(
                f"{header.name} drafts for another model: its hidden states have {n_embd} elements and "
                f"it reads layers {', '.join(map(str, layers))}; the model's have {target.n_embd}, and it "
                f"has {n_trunk} layers"
            )
        if (n_vocab := header.lengths.get(TOKENS, 0)) != target.n_vocab:
            raise ModelLoadError(
                f"{header.name} drafts for another model: its vocabulary has {n_vocab:,} tokens, the model's "
                f"{target.n_vocab:,}"
            )
        _check_own_vocabulary(header, n_vocab)
        check_attention(metadata)
        n_layers = metadata.integer("block_count", least=1, most=MAX_LAYERS)
        there = len({name.split(".")[1] for name in header.tensors if name.startswith("blk.")})
        metadata.relate("block_count", n_layers == there, f"{there}, of so many layers there are tensors")
        heads = metadata.integer("attention.head_count_kv", least=1, most=MAX_HEADS)
        size = n_embd // metadata.integer("attention.head_count", least=1, most=MAX_HEADS)
        keys = metadata.integer("attention.key_length", size)
        values = metadata.integer("attention.value_length", size)
        return cls(
            file=ModelFile.of(header.path, header.status),
            weights=sum(tensor.n_bytes for tensor in header.tensors.values()),
            block=metadata.integer("block_size", 16, least=2, most=MAX_BLOCK),
            mask=Metadata(header, "tokenizer.ggml").integer("mask_token_id", most=max(0, n_vocab - 1)),
            layers=layers,
            n_embd=n_embd,
            kv_elements=(n_layers * heads * keys, n_layers * heads * values),
            causal=metadata.get("attention.causal") is True,
        )


def _check_own_vocabulary(header: Header, n_vocab: int) -> None:
    """Of a drafter whose head has rows for some of the target's tokens, `d2t` says for which; llama.cpp puts
    its logits there (src/models/dflash.cpp). Raises ModelLoadError where it could not."""
    if "d2t" not in header.tensors:
        return
    ids = header.tables.get("d2t", np.empty(0, np.int64))
    if "output.weight" not in header.tensors:
        wrong = "there is no output.weight for it"
    elif not ids.size:
        wrong = "it must be a table of 64-bit integers"
    elif ids.min() < 0 or ids.max() >= n_vocab:
        wrong = f"its tokens must be 0 to {n_vocab - 1}, and are {ids.min()} to {ids.max()}"
    elif len(np.unique(ids)) != len(ids):
        wrong = "it has a token twice"
    else:
        return
    raise ModelLoadError(f"{header.name}: tensor d2t, of a drafter with a reduced vocabulary: {wrong}")
