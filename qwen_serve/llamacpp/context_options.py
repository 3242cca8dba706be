"""How a context is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .needs import DeviceSampler


@dataclass(frozen=True)
class ContextOptions:
    """`n_ctx` is in tokens of all sequences together; `n_outputs`, at least `n_seq`, is the most rows of a
    batch."""

    n_ctx: int
    n_seq: int
    n_batch: int
    n_ubatch: int
    n_outputs: int
    threads: int
    threads_batch: int
    flash_attn: str
    type_k: str
    type_v: str
    n_outputs_per_seq: int = 1
    """Most rows of one sequence that are sampled on the device; a verification has several."""
    n_samplers: int = 0
    """Number of sequence ids, from 0, whose rows are sampled on the device; rows of other ids are returned
    whole."""
    sampler: DeviceSampler = DeviceSampler.BEST
    """Their initial device sampler."""
    n_snapshots: int = 0
    """Tokens that `remove` can take back from a sequence of a recurrent model. Each costs one more recurrent
    state, or without the patch shared-snapshots one for every sequence id."""
    eval_callback: Any = None
    """A `ggml_backend_sched_eval_callback`, called for every graph as it is computed."""
    op_offload: bool = True
    """Let the GPU compute with copies of weights that are in the CPU's memory."""
    ahead: bool = False
    """A batch may be decoded before the rows of the one before it are read, if the build and the device's
    memory allow that (`runs_ahead`)."""
    unified: bool = True
    """All sequences share one pool of cells. Otherwise each has `n_ctx` / `n_seq` cells of its own, and
    copying a sequence copies its keys and values on the device."""
    batch_invariant: bool = False
    """Each of up to 64 tokens in a pass gets the same bits, whatever the others are, if the build and the
    device have kernels for that. Slower. Sequences need cells of their own."""
