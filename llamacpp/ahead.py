"""Steps that are launched before the rows of the one before are read (patch next-tokens).

The host need not know a step's tokens to launch the next one: the device sampler BEST writes them where that
one reads them. llama.cpp keeps the rows of two batches, so those of the first may be read while the second is
computed. Its launch returns when the first is done.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from . import ggml
from .patches import NEXT_TOKENS, brings

if TYPE_CHECKING:
    from collections.abc import Sequence

HAS_NEXT_TOKENS = brings(NEXT_TOKENS, "llama_set_next_tokens")
"""Whether this build can do that."""

MOST_ROWS = 64
"""Most rows of a step whose tokens the next one reads on the device."""


class _SampledRows(ctypes.Structure):
    """`struct llama_sampled_rows` of llama-ext.h."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("probs", "logits", "candidates")]


if HAS_NEXT_TOKENS:
    _P = ctypes.c_void_p
    _set_next_tokens = ggml.quick("llama_set_next_tokens", ctypes.c_bool, _P, _P)
    _sampled_rows = ggml.quick("llama_get_sampled_rows", ctypes.c_bool, _P, ctypes.POINTER(_SampledRows))


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where the samplers' results of a decode are going to be: addresses of the first row's."""

    call: int
    """The number of the decode."""
    probs: int
    logits: int
    candidates: int


def outputs_of(context: int, call: int) -> Outputs | None:
    """Those of the last decode, without waiting for it; None if this build cannot tell, or the rows are not
    in the order of the batch."""
    found = _SampledRows()
    if not HAS_NEXT_TOKENS or not _sampled_rows(context, ctypes.byref(found)):
        return None
    return Outputs(call, found.probs, found.logits, found.candidates)


class NextTokens:
    """Tensors on the device: `tokens`, I32 [MOST_ROWS], that BEST chose in the last step, and `bans`, F32
    [width, MOST_ROWS], added to the logits that it chooses from, of which the first `n_ends` are those of
    tokens that end a generation."""

    def __init__(self, tokens: int, bans: int, width: int, n_ends: int) -> None:
        self.tokens, self.bans = tokens, bans
        self._width, self._n_ends = width, n_ends
        self._ignoring: tuple[bool, ...] = ()

    def read(self, context: int) -> bool:
        """Have the next decode read its tokens there, a row each in the order of the last one. Returns False
        if the token embedding is on another device."""
        return bool(_set_next_tokens(context, self.tokens))

    def readable(self, context: int) -> bool:
        """Whether `read` would succeed."""
        able = self.read(context)
        _set_next_tokens(context, None)
        return able

    def ignore_ends(self, rows: Sequence[bool]) -> None:
        """Say for each row of the next steps whether tokens that end a generation are left out of the
        choice."""
        if (ignoring := tuple(rows)) == self._ignoring[: len(ignoring)]:
            return
        bans = np.zeros((MOST_ROWS, self._width), np.float32)
        bans[: len(ignoring), : self._n_ends] = np.where(ignoring, -np.inf, 0)[:, None]
        ggml.tensor_set(self.bans, bans.ctypes.data, 0, bans.nbytes)
        self._ignoring = ignoring
