"""The successor of each token in the synthetic model, and the layer whose neuron produces it.

The words form one path, which is cut into stretches. A layer's FFN has a neuron for each token of one
stretch: the last layer for the first stretch, the layer before it for the second, and so on. So a token's
successor belongs to the same layer or to an earlier one, and no later layer takes the successor as its input
and goes one step too far. The last stretch is a cycle. Every other token (bytes, syllables, special tokens,
words without a neuron) has an anchor, a word of the path, and continues as its anchor does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Chain:
    """`tokens`: those with a neuron, one stretch after the other; stretch s is in layer `n_layers - 1 - s`.

    `regions`: the path's words, cut into one part for each acceptance rate of the MTP block.

    By token id: `successor`; `anchor`, which is the token itself if it has a neuron; `drafted`, whether the
    MTP block drafts the successor. Otherwise it drafts `decoy`, the path's first word, which is no token's
    successor.
    """

    n_layers: int
    stretch: int
    tokens: Ids
    regions: tuple[Ids, ...]
    successor: Ids
    anchor: Ids
    drafted: npt.NDArray[np.bool_]
    decoy: int

    def neurons(self, layer: int) -> Ids:
        """The tokens for which `layer` has a neuron, in the neurons' order; the rest of its FFN is noise."""
        start = (self.n_layers - 1 - layer) * self.stretch
        return self.tokens[start : start + self.stretch]

    def follow(self, token: int, count: int) -> list[int]:
        """The `count` tokens after `token`."""
        path = []
        for _ in range(count):
            token = int(self.successor[token])
            path.append(token)
        return path


def make_chain(
    filler: Sequence[int],
    words: Sequence[int],
    vocab_size: int,
    *,
    n_layers: int,
    ffn: int,
    mtp_acceptance: Sequence[float],
    rng: np.random.Generator,
) -> Chain:
    """The chain through `filler` (a cycle) and through as many `words` as there are neurons for.

    The path has as many equal regions as `mtp_acceptance` has shares. A share holds exactly for the tokens of
    its region and for those with an anchor in it, the first share also for the filler; `rng` chooses the
    tokens.
    """
    path = np.asarray(words, np.int64)[: n_layers * ffn - len(filler)]
    tokens = np.concatenate([np.asarray(filler, np.int64), path])
    stretch = -(-tokens.size // -(-tokens.size // ffn))  # equal ones: a short last one would be a short cycle
    following = np.roll(tokens, -1)
    following[len(filler) - 1] = filler[0]
    # the second of the last stretch, because the first may be the decoy
    last = (tokens.size - 1) // stretch * stretch
    following[-1] = tokens[max(last, len(filler)) + 1]

    anchor = np.arange(vocab_size)
    others = np.setdiff1d(anchor, tokens)
    anchor[others] = path[np.arange(others.size) * path.size // max(others.size, 1)]
    successor = np.empty(vocab_size, np.int64)
    successor[tokens] = following
    successor[others] = successor[anchor[others]]

    regions = tuple(np.array_split(path, len(mtp_acceptance)))
    drafted = np.zeros(vocab_size, np.bool_)
    groups = [(np.asarray(filler, np.int64), mtp_acceptance[0])]
    for region, share in zip(regions, mtp_acceptance, strict=True):
        groups += [(region, share), (others[np.isin(anchor[others], region)], share)]
    for group, share in groups:
        drafted[rng.permutation(group)[: round(share * group.size)]] = True
    return Chain(n_layers, stretch, tokens, regions, successor, anchor, drafted, int(path[0]))
