"""What the loaded libllama has of our changes (patches/README.md)."""

import ctypes
import os
import re
from importlib.metadata import version
from typing import Final

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API

from .errors import LlamaError

AMX, RING, SHARED_SNAPSHOTS = "amx-broadcast", "layer-inputs-ring", "shared-snapshots"
F16_COPIES, BATCH_INVARIANT = "f16-copies", "batch-invariant"
REPACKED_WEIGHTS, ROW_SAMPLER = "repacked-weights", "row-sampler"
RAGGED_PASSES, OPERANDS, STATE_F16 = "ragged-passes", "operand-verification", "state-f16"
"""Changes to llama.cpp that change what the server does."""

NUMBER = re.compile(r"^\d+-")
"""Begins each name in a libllama of the days when each change was a patch of its own."""

HIDE = "LLAMA_PATCHES_HIDE"
"""Environment variable with changes, separated by commas, that the server does not use."""


def patches() -> tuple[str, ...]:
    """The names of the changes in order, such as `kv-window`, which the headers of the patches list; empty
    for stock llama.cpp.

    Changes in LLAMA_PATCHES_HIDE are left out. Source: `llama_patches()`, which patches/apply.cmake adds to
    libllama.
    """
    try:
        function = C._lib.llama_patches
    except AttributeError:
        return ()
    function.restype, function.argtypes = ctypes.c_char_p, []
    hidden = _hidden()
    names = (NUMBER.sub("", name) for name in function().decode().split())
    return tuple(name for name in names if name not in hidden)


def brings(patch: str, function: str) -> bool:
    """Whether libllama exports a function that a patch adds, and the patch is not hidden."""
    return patch not in _hidden() and hasattr(C._lib, function)


def _hidden() -> set[str]:
    """The hidden patches. Raises LlamaError for a name that has no effect here."""
    names = {name for name in os.environ.get(HIDE, "").split(",") if name}
    known = {AMX, RING, SHARED_SNAPSHOTS, OPERANDS, F16_COPIES}
    known |= {BATCH_INVARIANT, REPACKED_WEIGHTS, ROW_SAMPLER, STATE_F16}
    if unknown := names - known:
        raise LlamaError(f"{HIDE}: {min(unknown)}: want some of {', '.join(sorted(known))}")
    return names


LLAMA_VERSION: Final[str] = version("llama-cpp-python")

READS_OWN_CELLS: Final = {"attention-own-cells", "kq-mask-bits"} <= set(patches())
"""Whether a step reads only the cells of its own sequences (on an NVIDIA GPU with F16 keys and values). The
host then writes a bit for each other cell, and the GPU makes the mask."""


def amx_is_right() -> bool:
    """Whether weights may be repacked for AMX and other instructions when they are loaded.

    Stock llama.cpp computes qwen35 wrongly with AMX, or crashes (patches/README.md). Disabling AMX also
    disables other repacking.
    """
    return AMX in patches() or b"AMX_INT8 = 1" not in C.llama_print_system_info()
