"""Bytes, operations and kernels of a block drafter (DFlash), from its GGUF's tensor list."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.analysis.geometry import F32_BYTES, FLOATS, HEAD_KERNELS, Geometry, Work
from bench.errors import BenchError
from convert.errors import ConvertError
from convert.gguf_header import TensorInfo, read_tensors

if TYPE_CHECKING:
    from pathlib import Path

WINDOW = 512  # tokens that our server's drafter looks back on
# kernels that llama.cpp's CUDA backend launches for src/models/dflash.cpp, counted as those of geometry.py
BLOCK_KERNELS, INJECT_KERNELS, FUSE_KERNELS = 26, 9, 4


class BlockDrafter:
    """Layers, fusion and head of a drafter; embedding and head are the target's where it has none.

    What the target's layers made of a token goes to the host and back before it is injected (`host_bytes`).

    Raises:
        BenchError: the file is no block drafter's.
    """

    def __init__(self, path: Path, target: Geometry) -> None:
        try:
            tensors = {tensor.name: tensor for tensor in read_tensors(path)}
            self._fuse, self._head = tensors["fc.weight"], tensors.get("output.weight", target.head)
        except (OSError, ConvertError, KeyError) as error:
            raise BenchError(f"{path}: not a block drafter's tensors: {error}") from error
        self._layers = [tensor for name, tensor in tensors.items() if name.startswith("blk.")]
        self._keys = [
            tensor for tensor in self._layers if tensor.name.endswith(("attn_k.weight", "attn_v.weight"))
        ]
        queries = [tensor for tensor in self._layers if tensor.name.endswith("attn_output.weight")]
        self._n_layers, self._queries = len(queries), sum(tensor.shape[0] for tensor in queries)
        self._kv = target.kv_bytes * sum(tensor.shape[1] for tensor in self._keys)
        self._integer = self._fuse.type not in FLOATS

    def guess(self, rows: float, context: float) -> Work:
        """A pass that fills a block of `rows`."""
        seen = min(context, 1.5 * WINDOW) + rows
        weights = [*self._layers, self._head]
        operations = 2.0 * rows * _elements(weights) + 4.0 * self._queries * rows * seen
        kernels = float(self._n_layers * BLOCK_KERNELS + HEAD_KERNELS)
        return Work(_bytes(weights) + self._kv * (seen + rows), operations, kernels, self._integer)

    def inject(self, rows: float, *, extracted: float | None = None) -> Work:
        """Take in the features of `rows` tokens, of `extracted` that the target has given to the host."""
        weights = [self._fuse, *self._keys]
        features = F32_BYTES * self._fuse.shape[0]
        return Work(
            _bytes(weights) + self._kv * rows,
            2.0 * rows * _elements(weights),
            float(self._n_layers * INJECT_KERNELS + FUSE_KERNELS),
            self._integer,
            host_bytes=features * (rows + (rows if extracted is None else extracted)),
        )

    def read(self, prompt: float) -> Work:
        """Take in a prompt: all of its features go to the host, and those of the window back."""
        return self.inject(min(prompt, WINDOW), extracted=prompt)


def _bytes(tensors: list[TensorInfo]) -> float:
    return float(sum(tensor.n_bytes for tensor in tensors))


def _elements(tensors: list[TensorInfo]) -> float:
    return float(sum(tensor.n_elements for tensor in tensors if len(tensor.shape) == 2))
