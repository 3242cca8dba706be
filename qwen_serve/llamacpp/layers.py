"""Inputs of chosen layers of the trunk, row by row, for drafters.

`llama_set_embeddings_layer_inp` and `llama_get_embeddings_layer_inp` of llama.cpp's src/llama-ext.h, which
exports them with C++ names, copy the rows to the host. With the patch layer-inputs-ring the rows can stay on
the device, in a ring for each layer, whose places the caller assigns.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API
import numpy as np
import numpy.typing as npt

from .patches import RING, brings


def _bound(names: Sequence[str], arguments: list[Any], result: Any) -> Any:
    """The function under its C name, GCC's and Clang's C++ name, or MSVC's."""
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

HAS_RING = brings(RING, "llama_init_layer_inp_ring")
"""Whether this llama.cpp can keep the rows on the device."""

if HAS_RING:
    _init_ring = _bound(
        ["llama_init_layer_inp_ring"],
        [C.llama_context_p_ctypes, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32],
        ctypes.c_bool,
    )
    _share_ring = _bound(
        ["llama_share_layer_inp_ring"], [C.llama_context_p_ctypes, C.llama_context_p_ctypes], None
    )
    _set_rows = _bound(
        ["llama_set_layer_inp_rows"], [C.llama_context_p_ctypes, ctypes.c_void_p, ctypes.c_size_t], None
    )


@dataclass(frozen=True, slots=True)
class Ring:
    """The newest `length` rows of each sequence id below `slots`, and one spare row that is never read."""

    slots: int
    length: int
    spare: int = 0
    """Rows of each sequence that no drafter reads any more, so new rows may overwrite them."""

    @property
    def n_rows(self) -> int:
        """Rows of each layer."""
        return self.slots * self.length + 1

    def open(self, context: Any, which: Sequence[int]) -> bool:
        """Allocates the ring for these layers of a context; False if there is no memory."""
        layers = np.array(which, np.int32)
        return bool(_init_ring(context, layers.ctypes.data, len(layers), self.n_rows))

    def share(self, drafter: Any, trunk: Any) -> None:
        """Lets a drafter's context read the ring of the trunk's context, which must outlive it."""
        _share_ring(drafter, trunk)

    def rows(
        self, sequences: npt.NDArray[np.int32], positions: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int32]:
        """The ring rows of a batch's tokens. Tokens that later tokens of the batch would overwrite, and those
        of ids from `slots` on, go to the spare row."""
        newest = np.zeros(int(sequences.max()) + 1, np.int32)
        np.maximum.at(newest, sequences, positions)
        lost = (sequences >= self.slots) | (positions <= newest[sequences] - self.length)
        return np.where(lost, self.n_rows - 1, sequences * self.length + positions % self.length).astype(
            np.int32
        )


def set_ring_rows(context: Any, rows: npt.NDArray[np.int32]) -> None:
    """Sets the ring row of each token of the next batch; empty: stop filling the ring."""
    _set_rows(context, rows.ctypes.data, len(rows))
