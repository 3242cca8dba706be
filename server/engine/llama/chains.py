"""llama.cpp's own samplers in the graph: what readouts are measured against."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API

from . import ggml

if TYPE_CHECKING:
    from .context import Context

_sampled_token = ggml.quick("llama_get_sampled_token_ith", ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32)


class GreedyChains:
    """llama.cpp's greedy sampler on each of `n` sequence ids, as llama-server's `--backend-sampling` has it.

    They are the ids from 0 on of a context without readouts. To be closed after it.
    """

    def __init__(self, context: Context, n: int) -> None:
        self._context = context
        self._chains = []
        for sequence in range(n):
            chain = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
            C.llama_sampler_chain_add(chain, C.llama_sampler_init_greedy())
            C.llama_set_sampler(context._handle, sequence, chain)
            self._chains.append(chain)

    def tokens(self, indices: range) -> list[int]:
        """The tokens chosen at these indices of the last batch. Waits for the device."""
        return [_sampled_token(self._context._handle, index) for index in indices]

    def close(self) -> None:
        """Free the samplers. Idempotent."""
        while self._chains:
            C.llama_sampler_free(self._chains.pop())


def detach(context: Context, sequence: int) -> None:
    """Leave a sequence id without any sampler: llama.cpp then copies whole rows of all ids to the host."""
    ggml.set_sampler(context._handle, sequence, None)
