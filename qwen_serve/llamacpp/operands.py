"""Operands of recurrent layers in place of states: how verified tokens are taken back.

A pass of 2 to n tokens of a sequence, with more outputs than the last token's, leaves the sequence's state as
it is and keeps what its recurrent layers read. `llama_memory_seq_rm` may then take back any of its tokens;
those that stay are folded into the state before that is read again.
"""

import ctypes
from typing import Final

from .ggml import declare
from .patches import OPERANDS, brings

HAS_OPERANDS: Final = brings(OPERANDS, "llama_n_rs_operands")

if HAS_OPERANDS:
    _n_operands = declare("llama_n_rs_operands", ctypes.c_uint32, ctypes.c_void_p)

MOST_ROWS: Final = 63
"""Longest verification; longer ones are read by kernels for chunks."""

FLAG: Final = 0x40000000
"""LLAMA_RS_SEQ_OPERANDS of src/llama-ext.h, a bit of `n_rs_seq`."""


def n_rs_seq(rows: int, sequences: int) -> int:
    """The context parameter for verifications of up to `rows` tokens, of so many sequences at a time."""
    return FLAG | sequences << 8 | rows


def n_operands(context: int) -> int:
    """The longest verification that leaves the state as it is; 0 if the context keeps no operands."""
    return int(_n_operands(context)) if HAS_OPERANDS else 0
