"""What the loaded libllama was patched with (patches/README.md)."""

from __future__ import annotations

import ctypes
from typing import Final

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API


def patches() -> tuple[str, ...]:
    """The names of the patches in their order, such as `0001-ssm-out-2d`; empty for stock llama.cpp.

    Source: `llama_patches()`, which patches/apply.cmake adds to libllama.
    """
    try:
        function = C._lib.llama_patches
    except AttributeError:
        return ()
    function.restype, function.argtypes = ctypes.c_char_p, []
    return tuple(function().decode().split())


READS_OWN_CELLS: Final = {"0009-attention-own-cells", "0014-kq-mask-in-place"} <= set(patches())
"""Whether a step on an NVIDIA GPU, with F16 keys and values, reads the cells of its own sequences alone, and
the host does not write a mask over those of others for it."""

AMX = "0003-amx-broadcast"


def amx_is_right() -> bool:
    """Whether weights may be packed for AMX, and other instructions, when they are loaded.

    Stock llama.cpp computes qwen35 wrongly with AMX, or crashes (patches/README.md). Other packing goes with
    it.
    """
    return AMX in patches() or b"AMX_INT8 = 1" not in C.llama_print_system_info()
