"""Bytes, operations and kernels of a block drafter (DFlash), from its GGUF's tensor list."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qwen_serve.bench.analysis.geometry import F32_BYTES, FLOATS, HEAD_KERNELS, Geometry, Work
from qwen_serve.bench.errors import BenchError
from qwen_serve.llamacpp.errors import LlamaError
from qwen_serve.llamacpp.gguf import TensorInfo, read_header

if TYPE_CHECKING:
    from pathlib import Path

WINDOW = 512  # number of earlier tokens that qwen-serve's drafter attends to
# Kernels that llama.cpp's CUDA backend launches for src/models/dflash.cpp, counted as in geometry.py: # a
# layer with a block and the rows before it, a layer with rows alone, and the fusion of features
BLOCK_KERNELS, INJECT_KERNELS, FUSE_KERNELS = 27, 9, 4


class BlockDrafter:
    """Layers, fusion and head of a drafter. A drafter without embedding and head uses its target's.

    The features that the target's layers compute of each token are kept on the GPU, in a ring (the patch
    layer-inputs-ring).

    Raises:
        BenchError: the file is not a block drafter.
    """

    def __init__(self, path: Path, target: Geometry) -> None:
        try:
            tensors = read_header(path).tensors
            self._fuse, self._head = tensors["fc.weight"], tensors.get("output.weight", target.head)
        except (LlamaError, KeyError) as error:
            raise BenchError(f"{path}: not a block drafter's tensors: {error}") from error
        self._layers = [tensor for name, tensor in tensors.items() if name.startswith("blk.")]
        self._keys = [
            tensor for tensor in self._layers if tensor.name.endswith(("attn_k.weight", "attn_v.weight"))
        ]
        queries = [tensor for tensor in self._layers if tensor.name.endswith("attn_output.weight")]
        self._n_layers, self._queries = len(queries), sum(tensor.shape[0] for tensor in queries)
        self._kv = target.kv_bytes * sum(tensor.shape[1] for tensor in self._keys)
        self._features = F32_BYTES * self._fuse.shape[0]
        self._n_target_layers = self._fuse.shape[0] // self._fuse.shape[1]
        self._fuse_kernels = FUSE_KERNELS + 2 * self._n_target_layers  # gathering and concatenation
        self._integer = self._fuse.type not in FLOATS

    def keep(self, rows: float, *, passes: int = 1) -> Work:
        """Additional work of the target's passes over `rows` tokens: writing each token's features into the
        ring."""
        return Work(self._features * rows, kernels=float(passes * self._n_target_layers))

    def draft(self, rows: float, context: float) -> Work:
        """A pass that fills a block of `rows` tokens and injects as many of the newest tokens."""
        seen = min(context, 1.5 * WINDOW) + rows
        weights = [self._fuse, *self._layers, self._head]
        attention = 4.0 * self._queries * rows * seen
        return Work(
            _bytes(weights) + self._features * rows + self._kv * (seen + 2 * rows),
            2.0 * rows * (_elements(weights) + _elements(self._keys)) + attention,
            float(self._n_layers * BLOCK_KERNELS + self._fuse_kernels + HEAD_KERNELS),
            self._integer,
        )

    def inject(self, rows: float) -> Work:
        """A pass that reads the features of `rows` tokens at the end of a prompt."""
        weights = [self._fuse, *self._keys]
        return Work(
            _bytes(weights) + (self._features + self._kv) * rows,
            2.0 * rows * _elements(weights),
            float(self._n_layers * INJECT_KERNELS + self._fuse_kernels),
            self._integer,
        )


def _bytes(tensors: list[TensorInfo]) -> float:
    return float(sum(tensor.n_bytes for tensor in tensors))


def _elements(tensors: list[TensorInfo]) -> float:
    return float(sum(tensor.n_elements for tensor in tensors if len(tensor.shape) == 2))
