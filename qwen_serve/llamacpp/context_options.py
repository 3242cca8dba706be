"""How a context is made."""

from dataclasses import dataclass
from typing import Any

from .row_sampler import Place


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
    state_type: str = "f32"
    """In which the delta nets' states are kept, if the build can. F16: rounded after every token, or where
    the GPU reads a prompt as chunks of tokens, after these."""
    row_sampling: Place | None = None
    """Where rows are sampled, if the build has the sampler, else on the host; None: `logits` reads them."""
    n_snapshots: int = 0
    """Tokens that `remove` can take back from a sequence of a recurrent model. Each costs one more recurrent
    state, or without the patch shared-snapshots one for every sequence id."""
    n_operands: int = 0
    """The longest verification of a recurrent model whose tokens `remove` can take back, of any sequence, if
    the build and the model can (`Context.n_operands`); 0: `n_snapshots` counts."""
    operand_sequences: int = 1
    """Most sequences whose verified tokens can be taken back at the same time."""
    eval_callback: Any = None
    """A `ggml_backend_sched_eval_callback`, called for every graph as it is computed."""
    op_offload: bool = True
    """Let the GPU compute with copies of weights that are in the CPU's memory."""
    ahead: bool = False
    """A batch may be decoded before the tokens of the one before it are known to the host, if they were
    sampled where the token embedding is (`runs_ahead`)."""
    unified: bool = True
    """All sequences share one pool of cells. Otherwise each has `n_ctx` / `n_seq` cells of its own, and
    copying a sequence copies its keys and values on the device."""
    batch_invariant: bool = False
    """Each of up to 64 tokens in a pass gets the same bits, whatever the others are, if the build and the
    device have kernels for that. Slower. Sequences need cells of their own."""
