"""What a draft model's file says: its kind, its sizes, and whether it drafts for the model being served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from .errors import ModelLoadError
from .model_spec import kv_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from .gguf import Header
    from .model_spec import ModelSpec
    from .settings import EngineSettings

ARCHITECTURE = "dflash"
"""llama.cpp's name for block drafters (`general.architecture`)."""


@dataclass(frozen=True)
class DraftSpec:
    """A block drafter."""

    path: Path
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
        path, metadata = header.path, header.metadata
        if (kind := metadata.get("general.architecture")) != ARCHITECTURE:
            raise ModelLoadError(
                f"draft_model: {path} is of architecture {kind!r}; this server drafts with {ARCHITECTURE}"
            )
        if other := [name for name in header.tensors if name.startswith(("selector_", "markov_", "d2t"))]:
            raise ModelLoadError(
                f"draft_model: {path} has a tensor {other[0]}: a DFlash2 or DSpark drafter, or one with a "
                "vocabulary of its own; this server drafts with DFlash"
            )

        def integer(key: str, default: int | None = None) -> int:
            value = metadata.get(key, default)
            if not isinstance(value, int) or value < 0:
                raise ModelLoadError(
                    f"draft_model: {path}: its metadata has no usable {key} (it is {value!r})"
                )
            return value

        layers = metadata.get(f"{ARCHITECTURE}.target_layers")
        if not isinstance(layers, tuple) or not layers or not all(isinstance(i, int) for i in layers):
            raise ModelLoadError(
                f"draft_model: {path}: its metadata has no usable {ARCHITECTURE}.target_layers"
            )
        n_embd, trunk = integer(f"{ARCHITECTURE}.embedding_length"), len(target.layer_weights)
        if n_embd != target.n_embd or not all(0 <= int(layer) < trunk for layer in layers):
            raise ModelLoadError(
                f"draft_model: {path} drafts for another model: its hidden states have {n_embd} elements and "
                f"it reads layers {', '.join(map(str, layers))}; the model's have {target.n_embd}, and it "
                f"has {trunk} layers"
            )
        block = integer(f"{ARCHITECTURE}.block_size", 16)
        if block < 2:
            raise ModelLoadError(
                f"draft_model: {path}: {ARCHITECTURE}.block_size is {block}; want at least 2"
            )
        n_layers, heads = (
            integer(f"{ARCHITECTURE}.block_count"),
            integer(f"{ARCHITECTURE}.attention.head_count_kv"),
        )
        size = n_embd // max(1, integer(f"{ARCHITECTURE}.attention.head_count"))
        keys = integer(f"{ARCHITECTURE}.attention.key_length", size)
        values = integer(f"{ARCHITECTURE}.attention.value_length", size)
        return cls(
            path=path,
            weights=sum(header.tensors.values()),
            block=block,
            mask=integer("tokenizer.ggml.mask_token_id"),
            layers=tuple(int(layer) for layer in layers),
            n_embd=n_embd,
            kv_elements=(n_layers * heads * keys, n_layers * heads * values),
            causal=metadata.get(f"{ARCHITECTURE}.attention.causal") is True,
        )
