"""Steps that are launched before the tokens of the last step are read (patch next-tokens).

The host does not need a step's tokens to launch the next step: the device samplers BEST and TOP_K write them
to a tensor, and each token of the next step may come from a row of it. TOP_K guesses them
(`guessed_draws.py`). llama.cpp keeps the rows of two batches, so the rows of the first can be read while the
second is computed. Launching the second returns when the first is done.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from . import ggml
from .patches import NEXT_TOKENS, brings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from .guessed_draws import Drawn, DrawTable
    from .needs import DeviceSampler

HAS_NEXT_TOKENS = brings(NEXT_TOKENS, "llama_tensor_set_queued")
"""Whether this build can launch a step before the last step's tokens are read."""

MOST_ROWS = 64
"""Most rows of a step whose tokens the next step reads on the device."""


class _SampledRows(ctypes.Structure):
    """`struct llama_sampled_rows` of llama-ext.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("probs", "logits", "candidates")),
        ("n_last", ctypes.c_int32),
    ]


if HAS_NEXT_TOKENS:
    _P = ctypes.c_void_p
    _set_rows = ggml.quick("llama_set_next_token_rows", ctypes.c_bool, _P, _P, _P, ctypes.c_int32)
    _set_queued = ggml.quick("llama_tensor_set_queued", None, _P, _P, _P, ctypes.c_size_t)
    _sampled_rows = ggml.quick("llama_get_sampled_rows", ctypes.c_bool, _P, ctypes.POINTER(_SampledRows))


@dataclass(frozen=True, slots=True)
class Outputs:
    """Addresses of the samplers' results of one decode, those of its first row."""

    call: int
    """The number of the decode."""
    kinds: tuple[DeviceSampler, ...]
    """The device sampler of each sequence id in that decode."""
    probs: int
    logits: int
    candidates: int
    n_last: int
    """How many of the rows the last pass computed. Only their tokens can be read by the next step."""


def outputs_of(context: int, call: int, kinds: Sequence[DeviceSampler]) -> Outputs | None:
    """The outputs of the last decode, without waiting for it. None if this build has no such function, or if
    the rows are not in the order of the batch."""
    found = _SampledRows()
    if not HAS_NEXT_TOKENS or not _sampled_rows(context, ctypes.byref(found)):
        return None
    return Outputs(call, tuple(kinds), found.probs, found.logits, found.candidates, found.n_last)


class NextTokens:
    """Tensors on the device. `tokens`, I32 [MOST_ROWS]: the tokens that BEST chose, or TOP_K guessed, in the
    last step. `bans`, F32 [width, MOST_ROWS]: added to the logits that BEST chooses from; the first `n_ends`
    of a row belong to the tokens that end a generation. `draws`: what TOP_K's guesses depend on."""

    def __init__(self, tokens: int, bans: int, width: int, n_ends: int, draws: DrawTable) -> None:
        self.tokens, self.bans, self.draws = tokens, bans, draws
        self._width, self._n_ends = width, n_ends
        self._ignoring: tuple[bool, ...] = ()
        self._drawing = False
        """Whether `draws` has rows, on the device."""
        self._context = 0
        """Set by `attach`."""

    def attach(self, context: int) -> bool:
        """Use these tensors in the steps of this context. Returns whether it can read tokens from them."""
        self._context = context
        able = self.read(np.zeros(1, np.int32))
        _set_rows(context, None, None, 0)
        return able

    def read(self, rows: npt.NDArray[np.int32]) -> bool:
        """Make the next decode read each of its tokens from a row of `tokens`, or, for -1, from the batch.
        Returns False if the token embedding is on another device."""
        return bool(_set_rows(self._context, self.tokens, rows.ctypes.data, rows.size))

    def write(self, ignoring: Sequence[bool], drawn: Mapping[int, Drawn]) -> None:
        """Set how the rows of the steps that are launched from now on are chosen: whether BEST excludes the
        tokens that end a generation, and how TOP_K guesses (`DrawTable.arrays`). Steps that are being
        computed are not affected."""
        assert self._context
        changed = self.draws.arrays(drawn) if drawn or self._drawing else []
        self._drawing = bool(drawn)
        if tuple(ignoring) != self._ignoring[: len(ignoring)]:
            bans = np.zeros((MOST_ROWS, self._width), np.float32)
            bans[: len(ignoring), : self._n_ends] = np.where(ignoring, -np.inf, 0)[:, None]
            changed.append((self.bans, bans))
            self._ignoring = tuple(ignoring)
        for tensor, array in changed:
            _set_queued(self._context, tensor, array.ctypes.data, array.nbytes)
