"""Passes whose sequences have different numbers of tokens."""

from __future__ import annotations

import ctypes

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API

from .patches import RAGGED_PASSES, brings


def most_lengths(context: int) -> int:
    """How many different numbers of tokens the sequences of a pass may have, if some tokens have no row of
    logits. 1 without the patch ragged-passes, and where each sequence has cells of its own."""
    if not brings(RAGGED_PASSES, "llama_n_runs_max"):
        return 1
    function = C._lib.llama_n_runs_max
    function.restype, function.argtypes = ctypes.c_uint32, [ctypes.c_void_p]
    return int(function(context))
