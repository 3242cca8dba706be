"""llama.cpp's sampler chains."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API

if TYPE_CHECKING:
    from .context import Context


class SamplerChain:
    """llama.cpp's CPU samplers, in this order: top-k, temperature, top-p, min-p, a seeded draw.

    Temperature comes before top-p and min-p, as in transformers and vLLM, because that is what the sampling
    defaults of a checkpoint were chosen for.
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

    def sample(self, context: Context, index: int) -> int:
        """Draw from the logits of the batch's token `index`, which must be one of its outputs."""
        return int(C.llama_sampler_sample(self._handle, context._handle, index))

    def close(self) -> None:
        """Free the chain. Idempotent."""
        if self._handle:
            C.llama_sampler_free(self._handle)
            self._handle = None
