"""A synthetic block drafter (DFlash) for the synthetic model: exact shapes, and drafts right up to a chosen
length.

**Codes.** A token's embedding encodes its place in the chain, as cosines and sines of the place at random
frequencies. Rotating each pair by its frequency gives the code of the next token. The embedding also has the
token's class: how many tokens of the block after it are to be right, drawn once for each token.

**Heads.** Each query head is for one distance. A mask at that distance from the block's first token attends
to it, since their rotary angles match. All other masks attend to masks, whose values are zero. The head
rotates the code that it reads by the distance. For each distance there are also heads that rotate by too
much, to a distant word. Bits in the key, by class, enable one kind of heads and disable the other. So wrong
tokens have as high a probability as right ones.

Everything else is noise without effect: the target's features become keys that no query attends to. The
drafter has an embedding and a head of its own, as large as those that other drafters share with the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

import gguf
import numpy as np
import numpy.typing as npt

from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.models.weights import POOL_STEP, QUIET, MadeTensor, Noise, Pool
from qwen_serve.common.files import replacing
from qwen_serve.convert.draft import ARCH, add_draft_hyperparameters, expected_tensors
from qwen_serve.convert.draft_config import DraftConfig
from qwen_serve.convert.gguf_file import write_file
from qwen_serve.convert.metadata import add_tokenizer
from qwen_serve.convert.tensors import PlannedTensor, TensorPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from qwen_serve.bench.models.chain import Chain
    from qwen_serve.convert.config import ModelConfig
    from qwen_serve.convert.tensors import FloatType
    from qwen_serve.convert.vocab import Vocab

Floats = npt.NDArray[np.float32]

BITS = 4  # bits of a key: one for each query of a key head
KEY_ANGLE, KEY_BIT = 0.8, 0.3  # shares of a key's norm: its angles, and each of its bits
GAIN = 24.0  # of all scores
ASTRAY = 50_021  # distance in tokens of a wrong draft from the right one
CODE = 8.0  # what heads add, in units of an embedding


@dataclass(frozen=True)
class Drafter:
    """A drafter for a synthetic model: `lengths` are the mean numbers of tokens that are right, by region."""

    target: ModelConfig
    vocab: Vocab
    chain: Chain
    config: DraftConfig
    lengths: tuple[float, ...]
    seed: int

    @classmethod
    def make(
        cls, target: ModelConfig, vocab: Vocab, chain: Chain, lengths: Sequence[float], seed: int
    ) -> Drafter:
        """Raises BenchError for lengths beyond the block, or not one for each region."""
        config = draft_config(target)
        if wrong := [length for length in lengths if not 0 <= length <= config.block_size - 1]:
            raise BenchError(f"--block-lengths {wrong[0]}: want 0 to {config.block_size - 1} tokens")
        if len(lengths) not in (1, len(chain.regions)):
            raise BenchError(
                f"--block-lengths: {len(lengths)} of them; want one, or one for each of the "
                f"{len(chain.regions)} shares of --mtp-acceptance"
            )
        return cls(target, vocab, chain, config, tuple(lengths), seed)

    def write(self, path: Path, threads: int, outtype: FloatType = "F16") -> int:
        """Writes the GGUF under a temporary name, then renames it; returns the number of weights."""
        plan = self._plan(outtype)
        writer = gguf.GGUFWriter(path=None, arch=ARCH)
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(f"Synthetic DFlash drafter, {plan.n_elements / 1e9:.3g}B weights, seed {self.seed}")
        shown = ", ".join(f"{length:g}" for length in self.lengths)
        writer.add_description(
            f"Random weights, planted so that {shown} tokens of a block are right on average."
        )
        add_draft_hyperparameters(writer, self.config, outtype, mrope=True)
        add_tokenizer(writer, self.vocab)
        writer.add_uint32(gguf.Keys.Tokenizer.MASK_ID, self.config.mask_token)
        with replacing(path) as part:
            write_file(part, writer, plan, self.target, threads)
        return plan.n_elements

    def _plan(self, outtype: FloatType) -> TensorPlan:
        pool, tensors = Pool(np.random.default_rng([self.seed, 1])), []
        for number, (_, (name, shape)) in enumerate(expected_tensors(self.config)):
            dtype: FloatType = "F32" if len(shape) == 1 else "F16"
            scale = shape[-1] ** -0.5 * (QUIET if "ffn_down" in name or name == "fc.weight" else 1)
            noise = Noise(pool.scaled(scale, "F16"), number * POOL_STEP, shape[-1])
            made = MadeTensor(name, shape, dtype, self._rows(name, shape, noise))
            kind: FloatType = outtype if dtype == "F16" else dtype
            tensors.append(PlannedTensor(name, made, shape, kind, reorder=None, compute=None))
        return TensorPlan(tuple(tensors), n_blocks=self.config.n_layers, n_mtp_layers=0)

    # --- what is planted -----------------------------------------------------------------------------------

    @property
    def _half(self) -> int:
        return self.config.head_dim // 2

    @cached_property
    def _match(self) -> Match:
        return Match.best(self.config)

    @cached_property
    def _heads(self) -> list[list[tuple[int, int, bool]]]:
        """By key head, layer after layer: the (part of the code, distance, right or wrong) of its queries."""
        each = self.config.n_heads // self.config.n_kv_heads
        jobs = [(d, right) for d in range(1, self.config.block_size) for right in (True, False)]
        per_part = -(-len(jobs) // each)
        parts = min(
            self.config.n_layers * self.config.n_kv_heads // per_part,
            (self.config.hidden_size - self.config.block_size - 1) // (4 * self._half),
        )
        if not parts:
            raise BenchError("the drafter has too few heads for its block")
        return [
            [(part, *job) for job in jobs[start : start + each]]
            for part in range(parts)
            for start in range(0, len(jobs), each)
        ]

    @property
    def _pairs(self) -> int:
        return (1 + max(jobs[0][0] for jobs in self._heads)) * self._half

    @cached_property
    def _frequencies(self) -> npt.NDArray[np.float64]:
        return np.random.default_rng([self.seed, 2]).uniform(0, 2 * np.pi, self._pairs)

    @property
    def _classes(self) -> int:
        return 4 * self._pairs

    @property
    def _is_mask(self) -> int:
        return self._classes + self.config.block_size

    @cached_property
    def _places(self) -> npt.NDArray[np.int64]:
        """For every token: its anchor's index in the chain."""
        index = np.zeros(self.config.vocab_size, np.int64)
        index[self.chain.tokens] = np.arange(self.chain.tokens.size)
        return index[self.chain.anchor]

    @cached_property
    def _right(self) -> npt.NDArray[np.int64]:
        """For every token: how many tokens of the block after it are right."""
        rng, most = np.random.default_rng([self.seed, 3]), self.config.block_size - 1
        chances = np.empty((self.config.vocab_size, most))
        chances[:] = _chances(self.lengths[0], most)
        for length, region in zip(self.lengths, self.chain.regions, strict=False):
            if len(self.lengths) > 1:
                chances[np.isin(self.chain.anchor, region)] = _chances(length, most)
        right: npt.NDArray[np.int64] = (
            (rng.random((self.config.vocab_size, most)) < chances).cumprod(axis=1).sum(axis=1)
        )
        return right

    def _code(self, places: npt.NDArray[np.int64]) -> Floats:
        """[n, 2 * pairs]: for each part the cosines, then the sines."""
        angles = (places[:, None] * self._frequencies) % (2 * np.pi)
        waves = np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)
        parts = waves.reshape(2, len(places), self._pairs // self._half, self._half)
        return parts.transpose(1, 2, 0, 3).reshape(len(places), 2 * self._pairs)

    def _rows(
        self, name: str, shape: tuple[int, ...], noise: Noise
    ) -> Callable[[int, int], npt.NDArray[np.generic]]:
        layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
        match name.split(".", 2)[-1] if name.startswith("blk.") else name:
            case "token_embd.weight":
                return self._embeddings
            case "output.weight":
                return self._outputs
            case "fc.weight":
                return lambda first, last: self._fused(first, noise.rows(first, last))
            case "attn_q.weight":
                return _once(self._queries, layer)
            case "attn_k.weight":
                return _once(self._keys, layer)
            case "attn_v.weight":
                return _once(self._values, layer)
            case "attn_output.weight":
                return _once(self._turned, layer)
            case "attn_q_norm.weight":
                return lambda first, last: np.full(last - first, GAIN, np.float32)
            case _ if len(shape) == 1:
                return lambda first, last: np.ones(last - first, np.float32)
            case _:
                return noise.rows

    def _embeddings(self, first: int, last: int) -> Floats:
        tokens = np.arange(first, last)
        rows = np.zeros((last - first, self.config.hidden_size), np.float32)
        rows[:, : 2 * self._pairs] = self._code(self._places[tokens])
        rows[np.arange(last - first), self._classes + self._right[tokens]] = 2.0
        if first <= (mask := self.config.mask_token) < last:
            rows[mask - first] = 0
            rows[mask - first, self._is_mask] = 2.0
        return rows

    def _outputs(self, first: int, last: int) -> Floats:
        tokens = np.arange(first, last)
        rows = np.zeros((last - first, self.config.hidden_size), np.float32)
        own = self.chain.anchor[tokens] == tokens  # the others are no token's successor
        rows[own, 2 * self._pairs : 4 * self._pairs] = (
            self._code(self._places[tokens[own]]) / self._pairs**0.5
        )
        return rows

    def _fused(self, first: int, rows: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        planted = max(0, min(len(rows), self._is_mask - first))
        rows[:planted] = 0  # no part of the code, and in no class
        if first <= self._is_mask < first + len(rows):
            rows[self._is_mask - first] *= np.float16(1 / QUIET)  # like that of a mask, or the opposite
        return rows

    def _of(self, layer: int, key_head: int) -> list[tuple[int, int, bool]]:
        number = layer * self.config.n_kv_heads + key_head
        return self._heads[number] if number < len(self._heads) else []

    def _low(self, bit: int) -> int:
        """The index of an element of a head whose angle hardly moves. Bit 0 is the sink's."""
        return self._half - 1 - bit

    def _queries(self, layer: int) -> Floats:
        """A mask's query: angles turned back by the head's distance, its bit, and the sink."""
        c = self.config
        rows = np.zeros((c.n_heads, c.head_dim, c.hidden_size), np.float32)
        each, match = c.n_heads // c.n_kv_heads, self._match
        n = match.angles.size
        for head in range(c.n_heads):
            jobs, query = self._of(layer, head // each), rows[head, :, self._is_mask]
            query[self._low(0)] = match.sink
            if head % each < len(jobs):
                _, distance, _ = jobs[head % each]
                query[:n] = match.angle / n**0.5 * np.cos(distance * match.angles)
                query[self._half : self._half + n] = -match.angle / n**0.5 * np.sin(distance * match.angles)
                query[self._low(1 + head % each)] = match.bit
        return rows.reshape(-1, c.hidden_size)

    def _keys(self, layer: int) -> Floats:
        """A token's key: angles of zero, and a bit for each query, by class. A mask's key: the sink."""
        c = self.config
        rows = np.zeros((c.n_kv_heads, c.head_dim, c.hidden_size), np.float32)
        classes = slice(self._classes, self._classes + c.block_size)
        for head in range(c.n_kv_heads):
            rows[head, self._low(0), self._is_mask] = 1.0
            rows[head, : self._match.angles.size, classes] = KEY_ANGLE / self._match.angles.size**0.5
            rows[head, [self._low(1 + bit) for bit in range(BITS)], classes] = KEY_BIT
            for bit, (_, distance, right) in enumerate(self._of(layer, head)):
                on = (np.arange(c.block_size) >= distance) == right
                rows[head, self._low(1 + bit), classes] = np.where(on, KEY_BIT, -KEY_BIT)
        return rows.reshape(-1, c.hidden_size)

    def _values(self, layer: int) -> Floats:
        """A part of the token's code; for masks nothing."""
        c = self.config
        rows = np.zeros((c.n_kv_heads, c.head_dim, c.hidden_size), np.float32)
        for head in range(c.n_kv_heads):
            if jobs := self._of(layer, head):
                places = np.arange(c.head_dim)
                rows[head, places, jobs[0][0] * c.head_dim + places] = 1.0
        return rows.reshape(-1, c.hidden_size)

    def _turned(self, layer: int) -> Floats:
        """Into the code's second copy, which the output head reads, with each pair rotated by the head's
        distance.
        """
        c, half = self.config, self._half
        rows = np.zeros((c.hidden_size, c.n_heads, c.head_dim), np.float32)
        each, places = c.n_heads // c.n_kv_heads, np.arange(half)
        for head in range(c.n_heads):
            jobs = self._of(layer, head // each)
            if head % each < len(jobs):
                part, distance, right = jobs[head % each]
                angles = (distance if right else distance + ASTRAY) * self._frequencies[part * half :][:half]
                cos, sin = CODE * np.cos(angles), CODE * np.sin(angles)
                out = 2 * self._pairs + part * c.head_dim
                rows[out + places, head, places], rows[out + places, head, half + places] = cos, -sin
                rows[out + half + places, head, places] = sin
                rows[out + half + places, head, half + places] = cos
        return rows.reshape(c.hidden_size, -1)


@dataclass(frozen=True)
class Match:
    """How a query finds the token at its distance: shares of its norm for angles, bit and sink.

    A key's angles match in full at the distance, and `near` of that at the distance that comes closest. With
    a bit that is off, a match counts as much as the latter with one that is on; the sink lies in the middle.
    """

    angles: npt.NDArray[np.float64]
    """Rotations by one position of the pairs with the highest frequencies."""
    angle: float
    bit: float
    sink: float

    @classmethod
    def best(cls, config: DraftConfig) -> Match:
        """The number of pairs that distinguishes distances best."""
        half = config.head_dim // 2
        angles = config.rope["rope_theta"] ** (-np.arange(half) / half)
        others = np.arange(1, config.block_size - 1)[:, None]
        near, n = min((float(np.cos(others * angles[:n]).mean(axis=1).max()), n) for n in range(1, half // 2))
        gap = (1 - near) / 2
        match = (KEY_ANGLE**-2 + (gap / KEY_BIT) ** 2 + 1) ** -0.5
        return cls(angles[:n], match / KEY_ANGLE, match * gap / KEY_BIT, match)


def draft_config(target: ModelConfig) -> DraftConfig:
    """The published drafter's shapes for the 4B; for smaller models a smaller drafter with a shorter
    block.
    """
    large = target.hidden_size >= 2048
    layers = target.n_layers
    return DraftConfig(
        hidden_size=target.hidden_size,
        intermediate_size=9728 if large else target.hidden_size,
        n_layers=5 if large else 2,
        n_heads=32 if large else 8,
        n_kv_heads=8 if large else 4,
        head_dim=128 if large else 32,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        max_positions=target.max_positions,
        rms_norm_eps=target.rms_norm_eps,
        rope={"rope_type": "default", "rope_theta": target.rope["rope_theta"]},
        block_size=16 if large else 8,
        mask_token=target.vocab_size - 1,
        target_layers=(1, 8, 15, 22, 29) if layers > 30 else tuple(range(0, layers - 1, max(1, layers // 3))),
        sliding_window=None,
        windowed_layers=(),
        causal=None,
    )


def _once(make: Callable[[int], Floats], layer: int) -> Callable[[int, int], npt.NDArray[np.generic]]:
    """Rows of a matrix that is made when the first ones are requested."""
    made = cache(lambda: make(layer).astype(np.float16))
    return lambda first, last: made()[first:last]


def _chances(length: float, most: int) -> float:
    """Probability of each token, given that those before it are right, for a mean of so many right tokens."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(1, most + 1)) < length else (low, middle)
    return high if length >= most else low
