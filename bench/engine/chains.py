"""llama.cpp's own samplers in the graph: what the engine's device samplers are measured against."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API

from server.engine.llama import Context


@contextmanager
def greedy_chains(context: Context, n: int) -> Iterator[None]:
    """llama.cpp's greedy sampler on the first ``n`` sequence ids of a context without device samplers, as
    llama-server's ``--backend-sampling`` has it. The context is closed in the end, before the samplers."""
    chains = []
    for sequence in range(n):
        chain = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
        C.llama_sampler_chain_add(chain, C.llama_sampler_init_greedy())
        C.llama_set_sampler(context._handle, sequence, chain)
        chains.append(chain)
    try:
        yield
    finally:
        context.close()
        for chain in chains:
            C.llama_sampler_free(chain)


def sampled_tokens(context: Context, indices: Sequence[int]) -> list[int]:
    """What the samplers chose at these indices of the last batch. Waits for the device."""
    return [int(C.llama_get_sampled_token_ith(context._handle, index)) for index in indices]


def detach(context: Context, sequence: int) -> None:
    """Leave a sequence id without any sampler: llama.cpp then copies whole rows of all ids to the host."""
    C.llama_set_sampler(context._handle, sequence, None)
