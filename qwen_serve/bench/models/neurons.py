"""The constructed part of the synthetic model: each token's vector, and the FFN neurons that produce its
successor.

**Vectors.** There is one random vector of zero mean for every `hidden` tokens, and token t's vector is that
vector rolled by t. So rolling a vector by one place gives the next token's, except for a few tokens. The MTP
block needs no more than that to draft, for any vocabulary.

**Neurons.** The gate and up rows of a token's neuron are the token's vector. Its down column subtracts the
token and adds its successor. The gate is so small that SiLU is nearly linear, so a neuron's activation is
about the square of the cosine. Cosines with thousands of other tokens are small, and their squares add up to
no direction. (With a large gate, which cuts off below zero, they would add up to the successor's direction,
because vectors are rolled, and each layer would go one step further.)
"""

from __future__ import annotations

from math import exp
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

if TYPE_CHECKING:
    from qwen_serve.bench.models.chain import Chain, Ids

Floats = npt.NDArray[np.float32]
Array = npt.NDArray[Any]

MARK = 0.25  # in an embedding with RMS 1: the constant that tells the MTP block to be wrong
GATE, UP = 2.0, 8.0  # activations of a neuron for its own token
ANSWER = GATE / (1 + exp(-GATE)) * UP  # silu(gate) * up: the neuron's input to the down projection
# how much of the successor it adds, and of its token it removes, in units of an embedding
ADD, TAKE = 1.5, 1.0
# the MTP block's exceptions and wrong drafts, relative to 1 for the rolled embedding
OVERRULE, ERR = 2.0, 6.0
ERR_GATE = 12.0  # gate activation of the neuron for the mark


class Vectors:
    """A vector for every token: `base` [ceil(vocabulary / hidden), hidden], rolled by the token's id."""

    def __init__(self, base: Array) -> None:
        self.base, self.hidden = base, base.shape[1]
        # window `hidden - t` of a base vector written twice is the vector rolled by t
        self._windows = sliding_window_view(np.tile(base, 2), self.hidden, axis=1)

    @classmethod
    def draw(cls, vocab_size: int, hidden: int, rng: np.random.Generator) -> Self:
        """Random vectors of zero mean and RMS 1, in F32."""
        base = rng.standard_normal((-(-vocab_size // hidden), hidden), np.float32)
        base -= base.mean(axis=1, keepdims=True)
        base /= np.sqrt(np.square(base).mean(axis=1, keepdims=True))
        return cls(base)

    def half(self, scale: float) -> Vectors:
        """The vectors times `scale`, in F16: rounded once here rather than for every written row."""
        return Vectors((self.base * np.float32(scale)).astype(np.float16))

    def of(self, tokens: Ids) -> Array:
        """Vectors, [tokens, hidden]."""
        rows: Array = self._windows[tokens // self.hidden, self.hidden - tokens % self.hidden]
        return rows

    def part(self, tokens: Ids, first: int, last: int) -> Array:
        """Elements `first` to `last` of each vector: [last - first, tokens]."""
        windows = self._windows[:, :, first:last]
        rows: Array = windows[tokens // self.hidden, self.hidden - tokens % self.hidden]
        return rows.T


class Neurons(Protocol):
    """The constructed part of one FFN, `count` neurons: what each detects, and what it adds."""

    count: int

    def gate(self, first: int, last: int) -> Array:
        """Rows of neurons `first` to `last` in the gate projection: [last - first, hidden]."""

    def up(self, first: int, last: int) -> Array:
        """The same rows in the up projection."""

    def down(self, first: int, last: int) -> Array:
        """Rows `first` to `last` of the down projection: [last - first, count]."""


class TrunkVectors:
    """The constants of all layers' neurons, in F16; `rolled` handles tokens whose successor is the
    next id.
    """

    def __init__(self, chain: Chain, vectors: Vectors) -> None:
        self.chain, self.vectors = chain, vectors
        self.gate, self.up = (vectors.half(strength / vectors.hidden) for strength in (GATE, UP))
        self.rolled = Vectors(_answers(np.roll(vectors.base, 1, axis=1), vectors.base).astype(np.float16))


class TrunkNeurons:
    """Neurons of one layer: each detects its token, removes it and adds its successor."""

    def __init__(self, trunk: TrunkVectors, layer: int) -> None:
        self._trunk = trunk
        self._tokens = trunk.chain.neurons(layer)
        self._successors = trunk.chain.successor[self._tokens]
        self._odd = np.flatnonzero(_is_odd(self._tokens, self._successors, trunk.vectors.hidden))
        self.count = self._tokens.size

    def gate(self, first: int, last: int) -> Array:
        return self._trunk.gate.of(self._tokens[first:last])

    def up(self, first: int, last: int) -> Array:
        return self._trunk.up.of(self._tokens[first:last])

    def down(self, first: int, last: int) -> Array:
        columns = self._trunk.rolled.part(self._tokens, first, last)
        add, take = (ids[self._odd] for ids in (self._successors, self._tokens))
        part = self._trunk.vectors.part
        columns[:, self._odd] = _answers(part(add, first, last), part(take, first, last))
        return columns


class MtpNeurons:
    """Neurons of the MTP block: the first detects the mark and drafts the decoy; the others correct the
    rolling.

    Rolling is wrong where the successor is not the next id, or where the next id has another base vector.
    """

    def __init__(self, chain: Chain, vectors: Vectors) -> None:
        following = chain.successor[chain.tokens]
        odd = _is_odd(chain.tokens, following, vectors.hidden)
        rolled = np.roll(vectors.of(chain.tokens[odd]), 1, axis=1)
        mark = np.full((1, vectors.hidden), -1 / MARK, np.float32)
        self._inputs: Floats = np.concatenate([mark, rolled])
        self._inputs /= np.float32(vectors.hidden)
        self._targets = np.concatenate([[chain.decoy], following[odd]])
        self._vectors = vectors
        self.count = self._targets.size
        # the mark's gate is large, so that one sign passes and the other does not; its output is the same
        self._gates = self._scales(ERR_GATE, GATE)
        self._ups = self._scales(ANSWER / ERR_GATE, UP)
        self._outputs = self._scales(ERR / ANSWER, OVERRULE / ANSWER)

    def gate(self, first: int, last: int) -> Floats:
        return self._inputs[first:last] * self._gates[first:last, None]

    def up(self, first: int, last: int) -> Floats:
        return self._inputs[first:last] * self._ups[first:last, None]

    def down(self, first: int, last: int) -> Floats:
        return self._vectors.part(self._targets, first, last) * self._outputs

    def _scales(self, of_mark: float, of_others: float) -> Floats:
        scales = np.full(self.count, of_others, np.float32)
        scales[0] = of_mark
        return scales


def _answers(add: Floats, take: Floats) -> Floats:
    """What neurons add to the residual stream for each unit of their activation."""
    return np.float32(ADD / ANSWER) * add - np.float32(TAKE / ANSWER) * take


def _is_odd(tokens: Ids, successors: Ids, hidden: int) -> npt.NDArray[np.bool_]:
    """Tokens whose vector, rolled by one, is not that of their successor."""
    odd: npt.NDArray[np.bool_] = (successors != tokens + 1) | (successors % hidden == 0)
    return odd
