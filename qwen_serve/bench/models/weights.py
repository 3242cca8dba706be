"""The synthetic model's tensors, any rows at any time; only small tables are kept in memory.

An embedding is its token's vector (`bench.models.neurons`) plus a constant, the mark. Its sign decides
whether the MTP block drafts a wrong token; the trunk's neurons have zero mean, so the mark does not affect
them. FFNs have the neurons. In models with experts the shared expert has them, and its gate is always half
open. The router chooses at random among routed experts of noise, uniformly or, with `routing_zipf`, some more
often. Everything else is noise: rows whose scale keeps activations near one, and output projections that are
small compared with the residual stream.

Noise comes from one pool of normally distributed numbers, which is read from a different place for each
tensor. The values of weights do not affect a kernel's speed, and drawing each of them would take most of the
run's time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qwen_serve.bench.models.neurons import (
    MARK,
    Array,
    MtpNeurons,
    Neurons,
    TrunkNeurons,
    TrunkVectors,
    Vectors,
)
from qwen_serve.bench.models.routing import zipf_scales
from qwen_serve.convert.floats import convert
from qwen_serve.convert.safetensors import NUMPY_TYPES
from qwen_serve.convert.tensors import FloatType, PlannedTensor, TensorPlan, expected_tensors

if TYPE_CHECKING:
    from qwen_serve.bench.models.chain import Chain
    from qwen_serve.convert.config import ModelConfig

Rows = Callable[[int, int], Array]

POOL_ELEMENTS = 1 << 22
POOL_STEP = 104_729  # a prime: distance in the pool between the starts of two tensors
OWN = np.float32((1 - MARK**2) ** 0.5)  # what the mark leaves of the embedding's RMS for the token's vector
LEAN = 0.9  # the anchor's share of the vector of a token without a neuron
SHORT = 0.6  # such an embedding's length, so that the output is not mistaken for its anchor
QUIET = 1e-2  # scale of output projections that are noise; if much smaller, Q4_K's F16 scales underflow
SHARED = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")  # the MTP block uses the trunk's
LOGIT = 24.0  # RMS of a hidden state that is one embedding


class Pool:
    """Normally distributed numbers, scaled and rounded once for each requested scale."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._values = rng.standard_normal(POOL_ELEMENTS, np.float32)
        self._scaled: dict[tuple[float, str], Array] = {}

    def scaled(self, scale: float, dtype: FloatType) -> Array:
        """All numbers times `scale`, as `dtype`."""
        if (scale, dtype) not in self._scaled:
            values = self._values * np.float32(scale)
            self._scaled[scale, dtype] = values.astype(NUMPY_TYPES[dtype])
        return self._scaled[scale, dtype]

    def matrices(self, scale: float, dtype: FloatType) -> Array:
        """The same, in F16 before they are `dtype`."""
        if (key := (scale, f"{dtype} of F16")) not in self._scaled:
            self._scaled[key] = convert(self.scaled(scale, "F16"), "F16", dtype)
        return self._scaled[key]


class Noise:
    """Rows of `width` elements, from one place in the pool on."""

    def __init__(self, values: Array, place: int, width: int) -> None:
        self.values, self.place, self._width = values, place, width

    def rows(self, first: int, last: int) -> Array:
        """Rows `first` to `last`: a new array, [last - first, width]."""
        start = (self.place + first * self._width) % self.values.size
        missing, pieces = (last - first) * self._width, []
        while missing > 0:
            pieces.append(self.values[start : start + missing])
            start, missing = 0, missing - pieces[-1].size
        return np.concatenate(pieces).reshape(last - first, self._width)


@dataclass(frozen=True)
class MadeTensor:
    """A tensor whose rows are made when asked for; `rows(first, last)` is [last - first, width]. The rows of
    all experts' matrices follow one another. `noise`, if it holds nothing else."""

    name: str
    shape: tuple[int, ...]
    dtype: FloatType
    rows: Rows
    noise: Noise | None = None
    path: Path = Path("synthetic")

    def read(self, start: int, count: int) -> Array:
        """Elements `start` to `start + count`, row-major, as `dtype`."""
        width = _width(self.shape)
        first, last = start // width, -(-(start + count) // width)
        values = self.rows(first, last).reshape(-1)[start - first * width :][:count]
        return values.astype(NUMPY_TYPES[self.dtype], copy=False)


class Weights:
    """Every tensor of a synthetic model."""

    def __init__(
        self, config: ModelConfig, chain: Chain, rng: np.random.Generator, routing_zipf: float = 0.0
    ) -> None:
        self._config, self._chain = config, chain
        experts = config.experts
        self._routing = (
            zipf_scales(experts.count, experts.used, routing_zipf) if experts and routing_zipf else None
        )
        self._hidden = config.hidden_size
        self._vectors = Vectors.draw(config.vocab_size, config.hidden_size, rng)
        self._trunk = TrunkVectors(chain, self._vectors)
        self._mtp = MtpNeurons(chain, self._vectors)
        marked = [self._vectors.base * OWN + np.float32(mark) for mark in (MARK, -MARK)]
        self._marked = [Vectors(base.astype(np.float16)) for base in marked]
        self._pool = Pool(rng)
        assert self._mtp.count <= planted_width(config), "neurons for every exception of the MTP block"

    def plan(self, outtype: FloatType = "F16") -> TensorPlan:
        """All tensors, block by block, with matrices as `outtype`. What is not noise alone is made in F16."""
        tensors = []
        listed = expected_tensors(self._config, "", range(self._config.n_layers), has_mtp=True)
        for number, (_, name, rule) in enumerate(listed):
            if name.endswith(SHARED):
                continue
            shape = tuple(n for n in rule.shape(self._config) if n != 1)  # the convolution's middle axis is 1
            dtype: FloatType = "F32" if len(shape) == 1 or rule.keep_f32 else "F16"
            float_type = outtype if dtype == "F16" else dtype
            scale, place, width = self._scale(name, shape), number * POOL_STEP, _width(shape)
            noise = Noise(self._pool.scaled(scale, dtype), place, width)
            rows = self._rows(name, shape, noise)
            made = MadeTensor(name, shape, dtype, rows)
            if rows == noise.rows:
                if dtype == "F16":
                    noise = Noise(self._pool.matrices(scale, outtype), place, width)
                made = MadeTensor(name, shape, float_type, noise.rows, noise)
            tensors.append(PlannedTensor(name, made, shape, float_type, reorder=None, compute=None))
        return TensorPlan(tuple(tensors), n_blocks=self._config.n_layers + 1, n_mtp_layers=1)

    def _scale(self, name: str, shape: tuple[int, ...]) -> float:
        """Noise for the tensor's rows."""
        match _block_and_kind(name)[1]:
            case (
                "ffn_down.weight"
                | "ffn_down_shexp.weight"
                | "ffn_down_exps.weight"
                | "attn_output.weight"
                | "ssm_out.weight"
                | "nextn.eh_proj.weight"
            ):
                return float(QUIET * self._hidden**-0.5)
            case "ssm_conv1d.weight":
                return 0.5
            case _:
                return float(shape[-1] ** -0.5) if len(shape) > 1 else 1.0

    def _rows(self, name: str, shape: tuple[int, ...], noise: Noise) -> Rows:
        """The function that makes the rows of the tensor `name`."""
        block, kind = _block_and_kind(name)
        match kind:
            case "token_embd.weight" | "output.weight":
                return self._embeddings
            case "nextn.eh_proj.weight":
                return lambda first, last: self._roll(first, noise.rows(first, last))
            case "ffn_gate.weight" | "ffn_up.weight" | "ffn_gate_shexp.weight" | "ffn_up_shexp.weight":
                neurons = self._neurons(block)
                plant = neurons.gate if kind.startswith("ffn_gate") else neurons.up
                return lambda first, last: _rows_over(
                    noise.rows(first, last), plant(first, min(last, neurons.count))
                )
            case "ffn_down.weight":
                plant = self._neurons(block).down
                return lambda first, last: _columns_over(noise.rows(first, last), plant(first, last))
            case "ffn_down_shexp.weight":
                halved = self._neurons(block).down  # the sigmoid of zero, at the gate
                return lambda first, last: _columns_over(noise.rows(first, last), 2 * halved(first, last))
            case "ffn_gate_inp.weight" if self._routing is not None:
                scales = self._routing[np.random.default_rng(block).permutation(len(self._routing))]
                return lambda first, last: noise.rows(first, last) * scales[first:last, None]
            case "ffn_gate_inp_shexp.weight":
                return lambda first, last: np.zeros(last - first, np.float32)
            case "ssm_a":
                return lambda first, last: -np.exp(noise.rows(first, last))
            case "output_norm.weight" | "nextn.shared_head_norm.weight":
                return lambda first, last: np.full(last - first, LOGIT / self._hidden, np.float32)
            case _ if len(shape) == 1 and kind != "ssm_dt.bias":  # the other norms
                return lambda first, last: np.ones(last - first, np.float32)
            case _:
                return noise.rows

    def _neurons(self, block: int) -> Neurons:
        return self._mtp if block == self._config.n_layers else TrunkNeurons(self._trunk, block)

    def _embeddings(self, first: int, last: int) -> Array:
        tokens = np.arange(first, last)
        drafted, anchors = self._chain.drafted[first:last], self._chain.anchor[first:last]
        rows = np.empty((last - first, self._hidden), np.float16)
        for vectors, some in zip(self._marked, (drafted, ~drafted), strict=True):
            rows[some] = vectors.of(tokens[some])
        leaning = np.flatnonzero(anchors != tokens)
        short = self._vectors.of(tokens[leaning]) * np.float32((1 - LEAN**2) ** 0.5)
        short += np.float32(LEAN) * self._vectors.of(anchors[leaning])
        short *= OWN
        short += np.where(drafted[leaning], MARK, -MARK).astype(np.float32)[:, None]
        rows[leaning] = short * np.float32(SHORT)
        return rows

    def _roll(self, first: int, rows: Array) -> Array:
        """Rows of the MTP block's projection of [embedding, hidden state]: the embedding, rolled by one."""
        places = np.arange(len(rows))
        rows[places, (first + places - 1) % self._hidden] = 1
        return rows


def planted_width(config: ModelConfig) -> int:
    """The number of neurons that a block has room for: the width of its FFN, or of its shared expert."""
    width = config.intermediate_size if config.experts is None else config.experts.shared_ffn
    assert width is not None, "a dense model has a width"
    return width


def _width(shape: tuple[int, ...]) -> int:
    """Elements of a row; a vector's rows are single numbers."""
    return shape[-1] if len(shape) > 1 else 1


def _block_and_kind(name: str) -> tuple[int, str]:
    """`blk.7.ffn_up.weight` -> 7, `ffn_up.weight`; -1 for tensors outside blocks."""
    if not name.startswith("blk."):
        return -1, name
    _, block, kind = name.split(".", 2)
    return int(block), kind


def _rows_over(noise: Array, planted: Array) -> Array:
    noise[: len(planted)] = planted
    return noise


def _columns_over(noise: Array, planted: Array) -> Array:
    noise[:, : planted.shape[1]] = planted
    return noise
