"""The type in which the delta nets' states are kept; they are computed in F32."""

from __future__ import annotations

from typing import Final

from .patches import STATE_F16, patches

HAS_STATE_F16: Final = STATE_F16 in patches()

FLAG: Final = 0x20000000
"""LLAMA_RS_SEQ_STATE_F16 of src/llama-ext.h, a bit of `n_rs_seq`."""


def state_flag(state_type: str) -> int:
    """What the context parameter `n_rs_seq` has in addition for states of this type."""
    return FLAG if state_type == "f16" and HAS_STATE_F16 else 0
