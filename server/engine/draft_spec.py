"""What a draft model's file says: its kind, its sizes, and whether it drafts for the model being served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from qwen_serve.llamacpp.errors import ModelLoadError

from .gguf import Metadata
from .model_limits import MAX_HEADS, MAX_LAYERS, check_attention
from .model_spec import TOKENS, kv_bytes

if TYPE_CHECKING:
    from .gguf import Header
    from .model_file import ModelFile
    from .model_spec import ModelSpec
    from .settings import EngineSettings

ARCHITECTURE = "dflash"
"""llama.cpp's name for block drafters (`general.architecture`)."""

MAX_BLOCK = 256
"""Tokens of a block: every one is a row of one pass."""


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
        if (kind := header.metadata.get("general.architecture")) != ARCHITECTURE:
            raise ModelLoadError(
                f"{header.name} is of architecture {kind!r}; this server drafts with {ARCHITECTURE}"
            )
        if other := [name for name in header.tensors if name.startswith(("selector_", "markov_"))]:
            raise ModelLoadError(
                f"{header.name} has a tensor {other[0]}: a DFlash2 or DSpark drafter; "
                "this server drafts with DFlash"
            )
        metadata = Metadata(header, ARCHITECTURE)
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
            file=header.file,
            weights=sum(header.tensors.values()),
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
