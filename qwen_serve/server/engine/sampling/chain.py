"""llama.cpp's samplers for a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .parameters import SamplingParams

MIROSTAT_M = 100
"""Tokens that the first version of Mirostat considers (llama.cpp, common/sampling.cpp)."""


def samplers_of(params: SamplingParams, seed: int, n_vocab: int) -> Iterator[tuple[Any, ...]]:
    """The request's samplers in its order, then the one that draws, as `SamplerChain` takes them."""
    keep = max(1, params.min_keep)  # every sampler needs at least one token, except the draw
    mirostat = seed, params.mirostat_tau, params.mirostat_eta
    first = params.mirostat == 1
    known: dict[str, tuple[Any, ...]] = {
        "top_n_sigma": ("top_n_sigma", params.top_n_sigma),
        "top_k": ("top_k", params.top_k),
        "temperature": ("temp_ext", params.temperature, params.dynatemp_range, params.dynatemp_exponent),
        "typ_p": ("typical", params.typical_p, keep),
        "top_p": ("top_p", params.top_p, keep),
        "min_p": ("min_p", params.min_p, keep),
        "xtc": ("xtc", params.xtc_probability, params.xtc_threshold, keep, seed),
        "mirostat": ("mirostat", n_vocab, *mirostat, MIROSTAT_M) if first else ("mirostat_v2", *mirostat),
    }
    yield from (known[name] for name in params.chain)
    if not params.mirostat:
        yield "dist", seed
