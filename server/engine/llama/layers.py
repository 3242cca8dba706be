"""What goes into chosen layers of the trunk, row by row, for drafters; llama.cpp exports it with C++ names.

`llama_set_embeddings_layer_inp` and `llama_get_embeddings_layer_inp` of llama.cpp's src/llama-ext.h.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API

if TYPE_CHECKING:
    from collections.abc import Sequence


def _bound(names: Sequence[str], arguments: list[Any], result: Any) -> Any:
    """The function by its name in C, in GCC's and Clang's C++, or in MSVC's."""
    for name in names:
        if (function := getattr(C._lib, name, None)) is not None:
            function.argtypes, function.restype = arguments, result
            return function
    raise AttributeError(f"llama.cpp's library exports none of {', '.join(names)}")


set_embeddings_layer_inp = _bound(
    (
        "llama_set_embeddings_layer_inp",
        "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
        "?llama_set_embeddings_layer_inp@@YAXPEAUllama_context@@I_N@Z",
    ),
    [C.llama_context_p_ctypes, ctypes.c_uint32, ctypes.c_bool],
    None,
)
get_embeddings_layer_inp = _bound(
    (
        "llama_get_embeddings_layer_inp",
        "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
        "?llama_get_embeddings_layer_inp@@YAPEAMPEAUllama_context@@I@Z",
    ),
    [C.llama_context_p_ctypes, ctypes.c_uint32],
    ctypes.c_void_p,
)
