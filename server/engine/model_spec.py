"""The sizes of a model, from the metadata and the tensors of its file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import ModelLoadError
from .llama import CACHE_TYPES, row_bytes

if TYPE_CHECKING:
    from .gguf import Header
    from .settings import EngineSettings


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, in bytes unless said otherwise; lists are by layer of the trunk."""

    n_blocks: int
    """Layers in the file, multi-token-prediction blocks included."""
    n_ctx_train: int
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

    def kv_cell(self, layer: int, settings: EngineSettings) -> int:
        """Bytes that one token takes in one layer's cache."""
        return kv_bytes(self.kv_elements[layer], settings)

    def cell(self, settings: EngineSettings) -> int:
        """Bytes of one token in all layers."""
        return sum(self.kv_cell(layer, settings) for layer in range(len(self.kv_elements)))


def kv_bytes(elements: tuple[int, int], settings: EngineSettings) -> int:
    """Bytes of keys and values, given in elements, as the cache stores them."""
    keys, values = elements
    return row_bytes(CACHE_TYPES[settings.cache_type_k], keys) + row_bytes(
        CACHE_TYPES[settings.cache_type_v], values
    )


def shape_of(header: Header) -> Shape:
    """Read a model's shape from its metadata. Raises ModelLoadError when a key is missing.

    Key names: gguf-py's constants.py; what the layers keep: llama.cpp's llama-hparams.cpp.
    """
    arch = header.metadata.get("general.architecture")

    def integer(key: str, default: int | None = None) -> int:
        value = header.metadata.get(f"{arch}.{key}", default)
        if not isinstance(value, int):
            raise ModelLoadError(f"model: its metadata has no usable {arch}.{key}")
        return value

    def by_layer(key: str, default: int | bool) -> list[int]:
        value = header.metadata.get(f"{arch}.{key}", default)
        return [int(v) for v in value] if isinstance(value, tuple) else [int(value or 0)] * n_blocks

    n_blocks = integer("block_count")
    n_trunk = n_blocks - integer("nextn_predict_layers", 0)
    heads = by_layer("attention.head_count", 0)
    heads_kv = by_layer("attention.head_count_kv", heads[0])
    head_size = integer("embedding_length") // max(heads[0], 1)
    key_length = integer("attention.key_length", head_size)
    value_length = integer("attention.value_length", head_size)
    recurrent = by_layer("attention.recurrent_layers", False)
    if (
        f"{arch}.attention.recurrent_layers" not in header.metadata
        and f"{arch}.ssm.state_size" in header.metadata
    ):
        interval = integer("full_attention_interval", 4)
        recurrent = [layer % interval != interval - 1 for layer in range(n_blocks)]
    inner, state = integer("ssm.inner_size", 0), integer("ssm.state_size", 0)
    convolution = (integer("ssm.conv_kernel", 1) - 1) * (inner + 2 * integer("ssm.group_count", 0) * state)

    layers = [0] * n_blocks
    input_weights = output_weights = 0
    for name, size in header.tensors.items():
        if match := re.match(r"blk\.(\d+)\.", name):
            layers[int(match[1])] += size
        elif name.startswith("token_embd"):
            input_weights += size
        else:
            output_weights += size
    is_tied = "output.weight" not in header.tensors
    return Shape(
        n_blocks=n_blocks,
        n_ctx_train=integer("context_length"),
        layer_weights=tuple(layers[:n_trunk]),
        input_weights=input_weights,
        output_weights=output_weights + (input_weights if is_tied else 0),
        output_is_tied=is_tied,
        mtp_weights=sum(layers[n_trunk:]),
        mtp_kv_elements=(sum(heads_kv[n_trunk:]) * key_length, sum(heads_kv[n_trunk:]) * value_length),
        kv_elements=tuple(
            (0, 0) if recurrent[layer] else (heads_kv[layer] * key_length, heads_kv[layer] * value_length)
            for layer in range(n_trunk)
        ),
        layer_state=tuple(4 * (convolution + inner * state) if recurrent[i] else 0 for i in range(n_trunk)),
    )
