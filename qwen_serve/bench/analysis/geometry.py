"""Bytes, operations and kernels of a pass of Qwen3.5, from a GGUF's tensor list.

A pass reads every weight of the trunk once, the output head if a row is sampled, and the KV cache up to the
position. It reads and writes each sequence's recurrent state. Activations are left out, since they stay in
the GPU's caches.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gguf import GGMLQuantizationType

from qwen_serve.bench.errors import BenchError
from qwen_serve.llamacpp.errors import LlamaError
from qwen_serve.llamacpp.gguf import TensorInfo, read_header

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

F32_BYTES = 4
FLOATS = {GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16}
UBATCH = 512  # llama.cpp's default for the tokens of one pass
# Kernels of a block that llama.cpp's CUDA backend launches for src/models/qwen35.cpp with all patches and #
# one row, counted by a profiler (716 a step of Qwen3.5-4B with 8 copies). Stock llama.cpp launches 35 and 29.
LINEAR_KERNELS, ATTENTION_KERNELS, HEAD_KERNELS, NEXTN_KERNELS = 22, 22, 4, 5
# additional kernels of a block for several rows: gate, up, activation and sums are not fused (888 in all)
SEVERAL_ROWS_KERNELS = 5.4
DELTA_OPERATIONS = 7  # for each element of the recurrent state and token: decay 1, read 2, update 2, query 2


@dataclass(frozen=True)
class Work:
    """The costs of a pass. `integer`: the weights are quantized, so products may use 8-bit integers."""

    n_bytes: float = 0.0
    operations: float = 0.0
    kernels: float = 0.0
    integer: bool = False


@dataclass(frozen=True)
class Block:
    """A layer. `weights`: bytes; `elements`: number of elements of its matrices.

    `kv`: elements of keys and values for each token. `state` and `conv`: elements of the recurrent state and
    of the convolution's window, for each sequence. `queries`: width of all query heads, 0 for a recurrent
    layer.
    """

    weights: int
    elements: int
    kv: int
    queries: int
    state: int
    conv: int
    kernels: int


class Geometry:
    """A model's blocks, output head and MTP block.

    Args:
        kv_bytes: bytes of an element of the KV cache.

    Raises:
        BenchError: the tensors are not those of a dense Qwen3.5 model.
    """

    def __init__(self, tensors: Collection[TensorInfo], *, kv_bytes: float = 2.0) -> None:
        self.kv_bytes = kv_bytes
        by_name = {tensor.name: tensor for tensor in tensors}
        if any("_exps." in name for name in by_name):
            raise BenchError(
                "a model of experts: what a step reads of it depends on the router; want a dense one"
            )
        blocks: dict[int, dict[str, TensorInfo]] = defaultdict(dict)
        for tensor in tensors:
            if tensor.name.startswith("blk."):
                _, number, name = tensor.name.split(".", 2)
                blocks[int(number)][name] = tensor
        try:
            embedding = by_name["token_embd.weight"]
            self._head = by_name.get("output.weight", embedding)
            self._embedding_row = embedding.n_bytes / embedding.shape[1]
            made = {number: (_block(block), _is_draft(block)) for number, block in blocks.items()}
        except (KeyError, IndexError) as error:
            raise BenchError(f"not the tensors of a Qwen3.5 model: {error} is missing") from error
        self.trunk = [block for _, (block, draft) in sorted(made.items()) if not draft]
        self.draft = next((block for block, draft in made.values() if draft), None)
        self.n_bytes = sum(tensor.n_bytes for tensor in tensors)
        self.quantized = any(tensor.type not in FLOATS for tensor in tensors if len(tensor.shape) == 2)
        if not self.trunk:
            raise BenchError("not the tensors of a Qwen3.5 model: no blocks")

    @classmethod
    def load(cls, path: Path, *, kv_bytes: float = 2.0) -> Geometry:
        """The geometry of a GGUF. Raises BenchError if the file is unreadable or has another architecture."""
        try:
            return cls(read_header(path).tensors.values(), kv_bytes=kv_bytes)
        except (LlamaError, BenchError) as error:
            raise BenchError(f"{path}: {error}") from error

    @property
    def head(self) -> TensorInfo:
        """The tensor of the output head, which is the embedding if the two are tied."""
        return self._head

    @property
    def state_bytes(self) -> float:
        """Bytes of a sequence's recurrent state, over all layers."""
        return F32_BYTES * sum(block.state + block.conv for block in self.trunk)

    def decode(self, context: float, *, sequences: int = 1) -> Work:
        """A pass of one token for each of `sequences`, each with `context` earlier tokens."""
        return self.verify(1, context, sequences=sequences)

    def verify(self, rows: float, context: float, *, sequences: int = 1, snapshots: int = 0) -> Work:
        """A verification of `rows - 1` drafted tokens: a pass of `rows` tokens for each sequence, with logits
        of each.

        The pass also writes `snapshots` earlier states.
        """
        work = self._pass(self.trunk, rows, context, outputs=rows, sequences=sequences)
        further = sequences * min(rows - 1, snapshots) * self.state_bytes
        return replace(work, n_bytes=work.n_bytes + further)

    def prefill(self, tokens: int, *, ubatch: int = UBATCH) -> Iterator[Work]:
        """The passes that read `tokens` prompt tokens. The last pass has logits of one row."""
        for first in range(0, tokens, ubatch):
            rows = min(ubatch, tokens - first)
            last = first + rows == tokens
            yield self._pass(self.trunk, rows, first, outputs=1 if last else 0)

    def draft_step(self, context: float) -> Work:
        """A pass of the MTP block for one token. Raises BenchError if the file has no such block."""
        if self.draft is None:
            raise BenchError("--drafter mtp: the model has no MTP block")
        work = self._pass([self.draft], 1, context, outputs=1)
        return replace(work, kernels=work.kernels + NEXTN_KERNELS)

    def _pass(
        self, blocks: Sequence[Block], rows: float, context: float, *, outputs: float, sequences: int = 1
    ) -> Work:
        n_bytes = sum(block.weights for block in blocks) + rows * sequences * self._embedding_row
        operations = 2.0 * rows * sequences * sum(block.elements for block in blocks)
        kernels = sum(block.kernels for block in blocks) + 0.0
        if outputs:
            n_bytes += self._head.n_bytes
            operations += 2.0 * outputs * sequences * self._head.n_elements
            kernels += HEAD_KERNELS
        if rows * sequences > 1:
            kernels += SEVERAL_ROWS_KERNELS * len(blocks)
        seen = rows * context + rows * (rows + 1) / 2  # pairs of a query and a key
        for block in blocks:
            n_bytes += (
                sequences * self.kv_bytes * block.kv * (context + 2 * rows)
            )  # reads all keys and values, and writes the new ones
            n_bytes += sequences * F32_BYTES * 2 * (block.state + block.conv)
            operations += sequences * (4.0 * block.queries * seen + DELTA_OPERATIONS * block.state * rows)
        return Work(n_bytes, operations, kernels, self.quantized)


def _is_draft(block: Mapping[str, TensorInfo]) -> bool:
    return any(name.startswith("nextn.") for name in block)


def _block(tensors: Mapping[str, TensorInfo]) -> Block:
    weights = sum(tensor.n_bytes for tensor in tensors.values())
    elements = sum(
        tensor.n_elements
        for name, tensor in tensors.items()
        if len(tensor.shape) == 2 and name != "ssm_conv1d.weight"
    )
    if "ssm_out.weight" in tensors:
        heads, size = tensors["ssm_a"].shape[0], tensors["ssm_norm.weight"].shape[0]
        kernel, channels = tensors["ssm_conv1d.weight"].shape
        conv = (kernel - 1) * channels
        return Block(weights, elements, 0, 0, heads * size * size, conv, LINEAR_KERNELS)
    kv = tensors["attn_k.weight"].shape[1] + tensors["attn_v.weight"].shape[1]
    queries = tensors["attn_output.weight"].shape[0]
    return Block(weights, elements, kv, queries, 0, 0, ATTENTION_KERNELS)
