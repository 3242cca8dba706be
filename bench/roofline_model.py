"""Bytes, operations and kernels of a Qwen3.5 pass, from a GGUF's tensor list, and a card's time for them.

A pass reads every weight of the trunk once, the output head if any row is sampled, the KV cache up to the
position, and reads and writes each sequence's recurrent state. Activations are left out: they stay in the
card's caches. What a card cannot do at the same time is launching and working, so a pass takes

    kernels x launch + max(bytes / bandwidth, operations / compute)

which is a floor: real kernels reach neither the bandwidth nor the compute of the datasheet. A calibration
says how much of them.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, replace
from math import log
from typing import TYPE_CHECKING

from bench.errors import BenchError
from convert.errors import ConvertError
from convert.gguf_header import TensorInfo, read_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

F32_BYTES = 4
UBATCH = 512  # llama.cpp's default for the rows of one pass
# kernels that llama.cpp's CUDA backend launches for src/models/qwen35.cpp, counted node by node: quantizing
# the input of a matrix product is one, a norm and its weight are one
LINEAR_KERNELS, ATTENTION_KERNELS, HEAD_KERNELS, NEXTN_KERNELS = 35, 29, 4, 5
DELTA_OPERATIONS = 7  # per element of the recurrent state and token: decay 1, read 2, update 2, query 2


@dataclass(frozen=True)
class Work:
    """What a pass costs; `rows` is how many tokens share it, by which kernels' efficiency differs."""

    n_bytes: float = 0.0
    operations: float = 0.0
    kernels: float = 0.0
    rows: float = 1.0


@dataclass(frozen=True)
class Block:
    """One layer: `weights` [bytes], `elements` of its matrices, and of what it keeps for a sequence.

    `kv` is [elements a token], `state` [elements] of the recurrence and `conv` of the convolution's window;
    `queries` is the width of all query heads, 0 for a recurrent layer.
    """

    weights: int
    elements: int
    kv: int
    queries: int
    state: int
    conv: int
    kernels: int


class Geometry:
    """A model's blocks, head and draft head.

    Args:
        kv_bytes: of one element of the KV cache.

    Raises:
        BenchError: the tensors are not those of a Qwen3.5 model.
    """

    def __init__(self, tensors: Sequence[TensorInfo], *, kv_bytes: float = 2.0) -> None:
        self.kv_bytes = kv_bytes
        by_name = {tensor.name: tensor for tensor in tensors}
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
        if not self.trunk:
            raise BenchError("not the tensors of a Qwen3.5 model: no blocks")

    @classmethod
    def load(cls, path: Path, *, kv_bytes: float = 2.0) -> Geometry:
        """Of a GGUF file. Raises BenchError: unreadable, or of another architecture."""
        try:
            return cls(read_tensors(path), kv_bytes=kv_bytes)
        except (OSError, ConvertError, BenchError) as error:
            raise BenchError(f"{path}: {error}") from error

    @property
    def kv_token_bytes(self) -> float:
        """KV cache of one token, all layers."""
        return self.kv_bytes * sum(block.kv for block in self.trunk)

    @property
    def state_bytes(self) -> float:
        """Recurrent state of one sequence, all layers."""
        return F32_BYTES * sum(block.state + block.conv for block in self.trunk)

    def decode(self, context: float, *, sequences: int = 1) -> Work:
        """One token for each of `sequences`, which have `context` tokens behind them."""
        return self.verify(1, context, sequences=sequences)

    def verify(self, rows: float, context: float, *, sequences: int = 1) -> Work:
        """`rows` new tokens a sequence, each with its logits: a verification of `rows - 1` drafts."""
        return self._pass(self.trunk, rows, context, outputs=rows, sequences=sequences)

    def prefill(self, tokens: int, *, start: int = 0, ubatch: int = UBATCH) -> Iterator[Work]:
        """The passes that read `tokens` prompt tokens after `start`; the last one has logits of one row."""
        for first in range(0, tokens, ubatch):
            rows = min(ubatch, tokens - first)
            last = first + rows == tokens
            yield self._pass(self.trunk, rows, start + first, outputs=1 if last else 0)

    def draft_step(self, context: float) -> Work:
        """One token from the MTP block. Raises BenchError if the file has none."""
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
        seen = rows * context + rows * (rows + 1) / 2  # pairs of a query and a key
        for block in blocks:
            n_bytes += (
                sequences * self.kv_bytes * block.kv * (context + 2 * rows)
            )  # all read, the new written
            n_bytes += sequences * F32_BYTES * 2 * (block.state + block.conv)
            operations += sequences * (4.0 * block.queries * seen + DELTA_OPERATIONS * block.state * rows)
        return Work(n_bytes, operations, kernels, rows * sequences)


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


@dataclass(frozen=True)
class Terms:
    """Seconds, by what they are spent on: weights and caches being moved, arithmetic, launches."""

    memory: float = 0.0
    compute: float = 0.0
    launch: float = 0.0

    @property
    def total(self) -> float:
        return self.memory + self.compute + self.launch

    @property
    def binding(self) -> str:
        """The largest of the three."""
        return max(("memory", "compute", "launch"), key=lambda name: float(getattr(self, name)))

    def __add__(self, other: Terms) -> Terms:
        return Terms(self.memory + other.memory, self.compute + other.compute, self.launch + other.launch)

    def __mul__(self, times: float) -> Terms:
        return Terms(self.memory * times, self.compute * times, self.launch * times)


@dataclass(frozen=True)
class Card:
    """Bytes and operations (of dense F16 on tensor cores) a second, and seconds to launch a kernel.

    `vector`: F32 operations a second outside the tensor cores, by which what one card reaches is carried over
    to another. `compute_shares`: (rows of a pass, share of `compute` reached), by rows; in between, by their
    logarithm.
    """

    name: str
    bandwidth: float
    compute: float
    vector: float
    launch: float = 0.0
    compute_shares: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    source: str = ""

    def terms(self, work: Work) -> Terms:
        """The time of one pass."""
        memory = work.n_bytes / self.bandwidth
        compute = work.operations / (self.compute * self.compute_share(work.rows))
        launch = work.kernels * self.launch
        return Terms(memory, 0.0, launch) if memory >= compute else Terms(0.0, compute, launch)

    def compute_share(self, rows: float) -> float:
        """Of the compute, what a pass of so many rows reaches; beyond the known rows, as at the nearest."""
        known = self.compute_shares
        at = bisect_left([at_rows for at_rows, _ in known], rows)
        if at in (0, len(known)):
            return known[min(at, len(known) - 1)][1]
        (low, low_share), (high, high_share) = known[at - 1], known[at]
        weight = log(rows / low) / log(high / low)
        return low_share * (1 - weight) + high_share * weight


# Published datasheets: NVIDIA A10G (of AWS's G5 instances), L4 Tensor Core GPU, H200 SXM. F16 dense, then F32
CARDS = {
    card.name: card
    for card in (
        Card("A10G", 600e9, 70e12, 35e12, source="datasheet: 600 GB/s, FP16 tensor 70, FP32 35 TFLOPS"),
        Card("L4", 300e9, 121e12, 30.3e12, source="datasheet: 300 GB/s, FP16 tensor 121, FP32 30.3 TFLOPS"),
        Card("H200", 4800e9, 989e12, 67e12, source="datasheet: 4.8 TB/s, FP16 tensor 989, FP32 67 TFLOPS"),
    )
}


def preset_of(text: str) -> Card | None:
    """The preset that a card's name, as nvidia-smi and people write it, has in it."""
    words = re.findall(r"\w+", text.upper())
    return next((card for name, card in CARDS.items() if name.upper() in words), None)


@dataclass(frozen=True)
class Drafts:
    """Speculation: `count` drafts a step, each right with probability `acceptance`, if those before it were.

    `mtp`: drafted by the model's MTP block, one step of it each; else they cost nothing (n-grams).
    """

    count: int
    acceptance: float
    mtp: bool

    @property
    def tokens(self) -> float:
        """Expected tokens a verification, the one after the accepted drafts included."""
        return sum(self.acceptance**i for i in range(self.count + 1))


def prefill_terms(
    card: Card, geometry: Geometry, tokens: int, *, cached: bool, ubatch: int = UBATCH
) -> Terms:
    """Reading a prompt; `cached`: all of it but the last token is there already."""
    passes = [geometry.decode(tokens - 1)] if cached else geometry.prefill(tokens, ubatch=ubatch)
    return sum((card.terms(work) for work in passes), Terms())


def decode_terms(card: Card, geometry: Geometry, prompt: int, tokens: int, drafts: Drafts | None) -> Terms:
    """The `tokens - 1` output tokens after the first, which the prefill gives."""
    total, done, left = Terms(), 0.0, float(tokens - 1)
    while left > 1e-9:
        context = prompt + done
        if drafts is None:
            step, gained = card.terms(geometry.decode(context)), 1.0
        else:
            step, gained = card.terms(geometry.verify(drafts.count + 1, context)), drafts.tokens
            if drafts.mtp:
                step += card.terms(geometry.draft_step(context)) * drafts.count
        share = min(1.0, left / gained)  # the last step may be needed in part only
        total += step * share
        done, left = done + gained * share, left - gained * share
    return total
