"""How recurrent states are kept, and what takes rejected tokens back: one context parameter says it all."""

from typing import Final

from . import operands, snapshots
from .context_options import ContextOptions
from .patches import STATE_F16, patches

HAS_STATE_F16: Final = STATE_F16 in patches()
"""Whether the delta nets' states can be kept in F16."""

F16_FLAG: Final = 0x20000000
"""LLAMA_RS_SEQ_STATE_F16 of src/llama-ext.h, a bit of `n_rs_seq`."""


def n_rs_seq(options: ContextOptions) -> int:
    """The context parameter, as far as the build can."""
    if options.n_operands and operands.HAS_OPERANDS and options.unified:
        kept = operands.n_rs_seq(options.n_operands, options.operand_sequences)
    else:
        kept = snapshots.n_rs_seq(options.n_snapshots)
    return kept | (F16_FLAG if options.state_type == "f16" and HAS_STATE_F16 else 0)
