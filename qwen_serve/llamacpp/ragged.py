"""Passes whose sequences have different numbers of tokens."""

from __future__ import annotations

import ctypes

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API

from .patches import RAGGED_PASSES, brings


def ragged_passes(context: int) -> bool:
    """Whether a pass takes the tokens of a batch in its order, whatever numbers of them its sequences have.
    False without the patch ragged-passes, and where each sequence has cells of its own."""
    if not brings(RAGGED_PASSES, "llama_ragged_passes"):
        return False
    function = C._lib.llama_ragged_passes
    function.restype, function.argtypes = ctypes.c_bool, [ctypes.c_void_p]
    return bool(function(context))
