"""llama.cpp's CPU samplers."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API
import numpy as np

from . import ggml

if TYPE_CHECKING:
    import numpy.typing as npt

_TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""`struct llama_token_data`."""

_FEW = 1024
"""So few candidates are sampled in microseconds: not worth letting go of the GIL."""

_apply_quickly = ggml.quick("llama_sampler_apply", None, ctypes.c_void_p, ctypes.c_void_p)


class SamplerChain:
    """In this order: top-k, temperature, top-p, min-p, a seeded draw.

    Temperature comes before top-p and min-p, as in transformers and vLLM, because that is what the sampling
    defaults of a checkpoint were chosen for. The k best candidates alone give the same draw as all of them.
    """

    def __init__(self, *, temperature: float, top_k: int, top_p: float, min_p: float, seed: int) -> None:
        params = C.llama_sampler_chain_default_params()
        params.no_perf = True
        self._handle = C.llama_sampler_chain_init(params)
        add = partial(C.llama_sampler_chain_add, self._handle)
        if top_k > 0:
            add(C.llama_sampler_init_top_k(top_k))
        if temperature != 1.0:
            add(C.llama_sampler_init_temp(temperature))
        if top_p < 1.0:
            add(C.llama_sampler_init_top_p(top_p, 1))
        if min_p > 0.0:
            add(C.llama_sampler_init_min_p(min_p, 1))
        add(C.llama_sampler_init_dist(seed))
        self._address = ctypes.cast(self._handle, ctypes.c_void_p).value
        self._array = C.llama_token_data_array()
        self._array_address = ctypes.addressof(self._array)
        self._data = np.zeros(0, _TOKEN_DATA)
        self._ids, self._logits = self._columns(0)

    def draw(self, ids: npt.NDArray[np.integer], logits: npt.NDArray[np.float32]) -> int:
        """One of `ids`, whose logits are given; any order. Neither is changed."""
        n, array = len(ids), self._array
        if n != len(self._ids):
            self._ids, self._logits = self._columns(n)
        self._ids[...], self._logits[...] = ids, logits
        array.size, array.selected, array.sorted = n, -1, False
        if n <= _FEW:
            _apply_quickly(self._address, self._array_address)
        else:
            C.llama_sampler_apply(self._handle, ctypes.byref(array))
        return int(self._ids[array.selected])

    def _columns(self, n: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Room for the ids and the logits of `n` candidates, at whose beginning llama.cpp looks."""
        if n > len(self._data):
            self._data = np.zeros(n, _TOKEN_DATA)
            self._array.data = self._data.ctypes.data_as(C.llama_token_data_p)
        return self._data["id"][:n], self._data["logit"][:n]

    def close(self) -> None:
        """Free the chain. Idempotent."""
        if self._handle:
            C.llama_sampler_free(self._handle)
            self._handle = None
